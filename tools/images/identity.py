"""What an image is: the digest of everything that it is made from, and the record that a build leaves in it.

Two nodes with equal digests run equal images. Contents and paths count: neither times, nor modes, nor where
the checkout lies.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from bundle.environment.image import BuildInfo, get_python_version, list_distribution_versions
from bundle.environment.packages import InstalledPackages
from bundle.errors import EnvironmentUnfit, UsageError
from bundle.files import read_bytes_or_none
from tools.images.definition import Definition, Target

# What of these goes into the wheel; and what writes the record.
FOLDERS = ("bundle", "launch/recipes", "tools/images")
PACKAGE = (".py", ".json", ".yaml")
ALWAYS = ("docker-bake.hcl", ".dockerignore", "pyproject.toml", "README.md", "LICENSE")
LARGEST = 64 << 20


def fingerprint(root: Path, definition: Definition, target: Target) -> str:
    """ "sha256:..." of the target's entry in the definition and of all its files."""
    digest = hashlib.sha256()
    digest.update(json.dumps(_entry(definition, target), sort_keys=True).encode())
    for file in files(root, target):
        content = read_bytes_or_none(file, LARGEST)
        if content is None:
            raise UsageError(f"{file}: not a readable file of at most {LARGEST >> 20} MiB")
        name = file.relative_to(root).as_posix()
        digest.update(f"\0{name}\0{hashlib.sha256(content).hexdigest()}".encode())
    return f"sha256:{digest.hexdigest()}"


def files(root: Path, target: Target) -> Iterator[Path]:
    """Every file that the target is made from, in a fixed order."""
    locks = root / "images/locks"
    found = [root / name for name in ALWAYS if (root / name).is_file()]
    found += locks.glob(f"{target.stack}.*txt")  # also the part that only `make demo` reads: one rule for all
    found += [path for path in (root / "images" / target.backend).rglob("*") if path.is_file()]
    for folder in FOLDERS:
        found += [path for path in (root / folder).rglob("*") if path.suffix in PACKAGE and path.is_file()]
    yield from sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _entry(definition: Definition, target: Target) -> dict[str, object]:
    stack = definition.stacks[target.stack]
    bases = [target.base] + (["nvcc"] if target.backend == "cuda" else [])
    return {
        "target": target.name,
        "stack": stack.model_dump(),
        "bases": [definition.bases[name].model_dump() for name in bases if name in definition.bases],
        "source": definition.sources[stack.source].model_dump() if stack.source else None,
    }


def stamp(
    definition: Definition, name: str, installed: InstalledPackages, revision: str = "", inputs: str = ""
) -> BuildInfo:
    """The record of the image being built: its stack and, where known, the commit and the inputs' digest.

    Raises EnvironmentUnfit when it is not what was defined.
    """
    stack = definition.stack(name)
    packages = list_distribution_versions(installed)
    python = get_python_version()
    wrong = [
        f"{package}: {packages.get(package, 'not installed')}, and the stack says {pin.version}"
        for package, pin in stack.pins.items()
        if not _is(packages.get(package, ""), pin.version)
    ]
    pythons = {base.python for base in definition.bases_of(name).values()}
    if not any(python.startswith(f"{wanted}.") for wanted in pythons):
        wrong.append(f"Python {python}, and the base says {' or '.join(sorted(pythons))}")
    if wrong:
        raise EnvironmentUnfit(f"this is not the stack {name} of docker-bake.json", wrong)
    source = {stack.source: definition.sources[stack.source].commit} if stack.source else {}
    return BuildInfo(
        schema=1,
        stack=name,
        revision=revision,
        inputs=inputs,
        python=python,
        sources=source,
        packages=packages,
    )


def _is(installed: str, wanted: str) -> bool:
    """Whether a version is the wanted one, whatever build it is ("2.13.0+cpu" is 2.13.0)."""
    return installed.partition("+")[0].partition(" ")[0] == wanted
