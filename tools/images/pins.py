"""The digests and hashes of docker-bake.json that are empty: read where they are published, and filled in."""

import hashlib
import json
import re
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPResponse
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError
from urllib.parse import unquote

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from bundle.errors import TargetUnavailable, UsageError
from tools.images import agreement, definition, locks
from tools.images.definition import Definition

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_EMPTY_VALUE = re.compile(r'("(digest|checksum|hashes)":\s*)(?:""|\[\])')
_TIMEOUT_SECONDS = 120


class _Gap(NamedTuple):
    """One empty value: its place, whose last part is its key, and the function that reads the value."""

    place: str
    read: Callable[[], str | list[str]]


def fill(root: Path) -> tuple[list[str], list[str]]:
    """Return the places that were filled, and a message for each that could not be read.

    Write docker-bake.json, and the locks that have the hashes of pins.
    """
    values, failures = dict[str, str](), []
    gaps = list(_list_gaps(root, definition.load(root)))
    for gap in gaps:
        try:
            values[gap.place] = json.dumps(gap.read())
        except (OSError, subprocess.SubprocessError, TargetUnavailable, UsageError) as error:
            failures.append(f"{gap.place}: {error}")
    # The empty values of a key stand in the file in the order of the definition.
    places = {key: iter([g.place for g in gaps if g.place.endswith(f".{key}")]) for key in
              ("digest", "checksum", "hashes")}  # fmt: skip

    def replace(match: re.Match[str]) -> str:
        value = values.get(next(places[match[2]]))
        return match[0] if value is None else match[1] + value

    file = root / definition.FILE
    file.write_text(_EMPTY_VALUE.sub(replace, file.read_text()))
    _write_hashes(root, definition.load(root))
    return list(values), failures


def _list_gaps(root: Path, images: Definition) -> Iterator[_Gap]:
    for name, base in images.bases.items():
        if not base.digest:
            yield _Gap(f"BASES.{name}.digest", partial(_read_base_digest, base.image))
    for name, source in images.sources.items():
        if not source.checksum:
            url = agreement.address(source.archive, source.commit)
            yield _Gap(f"SOURCES.{name}.checksum", partial(_read_checksum, url))
    for name, stack in images.stacks.items():
        pythons = {base.python for base in images.bases_of(name).values()}
        for package, pin in stack.pins.items():
            if pin.hashes == []:
                read = partial(_read_hashes, _find_index(root), package, pin.version, pythons)
                yield _Gap(f"STACKS.{name}.pins.{package}.hashes", read)


def _read_base_digest(image: str) -> str:
    """Return the digest of an image's index, from its registry."""
    command = ["docker", "buildx", "imagetools", "inspect", image, "--format", "{{json .Manifest}}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    if done.returncode:
        raise TargetUnavailable(done.stderr.strip()[:300])
    digest = str(json.loads(done.stdout)["digest"])
    if not _DIGEST.fullmatch(digest):
        raise UsageError(f"the registry has no SHA-256 of {image} ({digest[:100]})")
    return digest


def _read_checksum(url: str) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with _open(url) as answer:
        while part := answer.read(1 << 20):
            digest.update(part)
    return f"sha256:{digest.hexdigest()}"


def _read_hashes(index: str, package: str, version: str, pythons: set[str]) -> list[str]:
    """Return the SHA-256 of a version's wheels for Linux and these Pythons in a package index."""
    with _open(f"{index.rstrip('/')}/{package}/") as answer:
        page = answer.read().decode()
    tags = {f"cp{python.replace('.', '')}" for python in pythons}
    hashes = set()
    for name, digest in re.findall(r'href="[^"]*?([^"/]+)#sha256=([0-9a-f]{64})"', page):
        try:
            _, wheel_version, _, wheel_tags = parse_wheel_filename(unquote(name))
        except InvalidWheelFilename:
            continue
        if wheel_version.public == version and any(
            tag.interpreter in tags and "linux" in tag.platform for tag in wheel_tags
        ):
            hashes.add(f"sha256:{digest}")
    if not hashes:
        raise UsageError(
            f"{index} has no wheel of {package} {version} for Linux and {', '.join(sorted(tags))}"
        )
    return sorted(hashes)


def _find_index(root: Path) -> str:
    """Return the default of TORCH_INDEX in docker-bake.hcl, where the CPU builds of torch are."""
    text = (root / "docker-bake.hcl").read_text()
    match = re.search(r'variable "TORCH_INDEX" \{[^}]*?default\s*=\s*"([^"]+)"', text)
    if match is None:
        raise UsageError("docker-bake.hcl: TORCH_INDEX has no default. Set it to a package index")
    return match[1]


def _open(url: str) -> HTTPResponse:
    try:
        answer: HTTPResponse = urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS)
        return answer
    except URLError as error:
        raise TargetUnavailable(f"{url}: {error.reason}") from error


def _write_hashes(root: Path, images: Definition) -> None:
    """Write the hashes of pins into the locks of what stands apart."""
    for name, stack in images.stacks.items():
        apart = images.backends[stack.backend].apart
        file = root / locks.DIRECTORY / f"{name}.{apart.name}.txt"
        text = file.read_text()
        for package, block in locks.blocks(text):
            pin = stack.pins.get(package)
            if pin is not None and pin.hashes is not None:
                text = text.replace(block, locks.to_block(package, pin))
        file.write_text(text)
