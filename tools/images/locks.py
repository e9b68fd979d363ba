"""The lock of a stack: what pyproject.toml and docker-bake.json ask for, resolved by `uv pip compile`.

Every file in it has its hash. uv reads the index that its environment names; the lock names none, so that it
holds wherever the same files are served.
"""

import json
import os
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from bundle import files
from bundle.errors import EnvironmentUnfit, UsageError
from tools.images.definition import Definition, Pin

DIRECTORY = Path("images/locks")


@dataclass(frozen=True)
class Project:
    """The parts of pyproject.toml that an image depends on."""

    name: str
    version: str
    dependencies: tuple[str, ...]
    extras: Mapping[str, tuple[str, ...]]

    def requirements(self, extras: Iterable[str]) -> list[str]:
        """Every requirement of the package with these extras, sorted, each once.

        Raises UsageError for an extra that is not there.
        """
        wanted = [*self.dependencies, *(r for extra in extras for r in self._extra(extra))]
        return sorted(set(wanted), key=str.lower)

    def _extra(self, name: str) -> Iterator[str]:
        if name not in self.extras:
            raise UsageError(f"pyproject.toml has no extra {name!r}. Choose one of {', '.join(self.extras)}")
        for entry in self.extras[name]:
            requirement = Requirement(entry)
            if requirement.name == self.name:
                for inner in sorted(requirement.extras - {name}):
                    yield from self._extra(inner)
            else:
                yield entry


def project(root: Path) -> Project:
    """The project of the checkout at `root`. Raises UsageError when pyproject.toml cannot be understood."""
    file = root / "pyproject.toml"
    try:
        table = tomllib.loads(files.read_text_if_small(file) or "")["project"]
        extras = {name: tuple(entries) for name, entries in table["optional-dependencies"].items()}
        for entry in [*table["dependencies"], *(r for entries in extras.values() for r in entries)]:
            Requirement(entry)
        return Project(table["name"], table["version"], tuple(table["dependencies"]), extras)
    except (tomllib.TOMLDecodeError, InvalidRequirement, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{file}: {type(error).__name__}: {str(error)[:200]}") from error


def input_text(definition: Definition, project: Project, name: str) -> str:
    """The text of STACK.in: every pin with its reason, and what the package itself requires."""
    stack = definition.stack(name)
    backend = definition.backends[stack.backend]
    lines = [f"# Made from docker-bake.json and pyproject.toml by `python -m tools.images lock {name}`."]
    for package, pin in stack.pins.items():
        lines += [f"# {pin.why}", f"{_with_extras(package, pin)}=={pin.version}"]
    if backend.requires:
        lines += [f"# What the {stack.backend} base's own programs, and what is built from source, import.",
                  *backend.requires]  # fmt: skip
    lines += ["# pyproject.toml", *project.requirements(stack.extras)]
    return "\n".join(lines) + "\n"


def lock(root: Path, definition: Definition, project: Project, name: str) -> list[Path]:
    """The files written: the input, the lock, the lock of what stands apart, and the lock's parts.

    Raises EnvironmentUnfit when uv is not installed and UsageError with uv's words when nothing resolves.
    """
    directory = root / DIRECTORY
    source, target = directory / f"{name}.in", directory / f"{name}.txt"
    source.write_text(input_text(definition, project, name))
    kept, apart = _divided(_compiled(root, definition, name), definition, name)
    backend = definition.backends[definition.stack(name).backend]
    other = directory / f"{name}.{backend.apart.name}.txt"
    target.write_text(f"# Made from {source.name} by `python -m tools.images lock {name}`.\n{kept}")
    other.write_text(f"# {', '.join(backend.apart.packages)}: {backend.apart.why}.\n{apart}")
    parts = part_texts(definition, project, name, kept)
    for part, content in parts.items():
        (directory / part).write_text(content)
    return [source, target, other, *(directory / part for part in parts)]


def part_texts(definition: Definition, project: Project, name: str, lock_text: str) -> dict[str, str]:
    """File name -> text of every part of a lock: the entries that its extras lead to."""
    stack = definition.stack(name)
    found = {}
    for part, entry in stack.parts.items():
        wanted = [Requirement(line).name for line in project.requirements(entry.extras)]
        chosen = _reachable(lock_text, {*stack.pins, *map(canonicalize_name, wanted)})
        body = "".join(block for package, block in blocks(lock_text) if package in chosen)
        found[f"{name}.{part}.txt"] = f"# Of {name}.txt: {entry.why}.\n{body}"
    return found


def _reachable(lock_text: str, roots: set[str]) -> set[str]:
    """The roots and all that they require, as the lock's own comments say who wanted what."""
    wanted_by = {
        package: set(re.findall(r"^ +#(?: via)? +([a-z0-9][a-z0-9._-]*)$", block, re.MULTILINE))
        for package, block in blocks(lock_text)
    }
    found: set[str] = set()
    new = roots
    while new:
        found |= new
        new = {package for package, parents in wanted_by.items() if parents & found} - found
    return found


def _compiled(root: Path, definition: Definition, name: str) -> str:
    stack = definition.stack(name)
    python = max(base.python for base in definition.bases_of(name).values())
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "pyproject.toml").write_text(_settings(definition, name))
        command = ["uv", "pip", "compile", "--universal", "--generate-hashes", "--no-header", "--quiet"]
        command += ["--python-version", python, str((root / DIRECTORY / f"{name}.in").resolve())]
        try:
            result = subprocess.run(
                command, cwd=temporary, capture_output=True, text=True, env=_environment()
            )
        except FileNotFoundError as error:
            raise EnvironmentUnfit("uv is not installed: pip install uv, or run `make locks`") from error
    if result.returncode:
        raise UsageError(f"uv finds no lock for {name} ({stack.backend})", result.stderr.splitlines()[:30])
    return re.sub(r"(# +|via )-r \S*/", r"\1-r ", result.stdout)


def _settings(definition: Definition, name: str) -> str:
    """The [tool.uv] that a lock is made under: for which systems, and what packages are taken to require."""
    stack = definition.stack(name)
    lines = ["[tool.uv]", f"environments = {json.dumps(_environments(definition, name))}"]
    for package, needs in definition.backends[stack.backend].metadata.items():
        lines += ["[[tool.uv.dependency-metadata]]", f'name = "{package}"',
                  f"requires-dist = {json.dumps(needs.requires)}"]  # fmt: skip
    return "\n".join(lines) + "\n"


def _environments(definition: Definition, name: str) -> list[str]:
    """The machines that a lock is for, as markers: one Python in an image; the cpu stack on laptops too."""
    if definition.stack(name).backend == "cpu":
        return ["sys_platform == 'linux'", "sys_platform == 'darwin'"]
    pythons = sorted({base.python for base in definition.bases_of(name).values()})
    return [f"sys_platform == 'linux' and python_version == '{python}'" for python in pythons]


def _environment() -> Mapping[str, str]:
    """Ours, with uv told to trust what the system trusts."""
    return {"UV_SYSTEM_CERTS": "1", **os.environ}


def _divided(compiled: str, definition: Definition, name: str) -> tuple[str, str]:
    """(the lock, the lock of what stands apart) of a compiled text."""
    stack = definition.stack(name)
    apart = definition.backends[stack.backend].apart.packages
    kept, others = [], []
    for package, block in blocks(compiled):
        pin = stack.pins.get(package)
        if package not in apart:
            kept.append(block)
        elif pin is not None and pin.hashes is not None:
            others.append(to_block(package, pin))
        else:
            others.append(block)
    return "".join(kept), "".join(others)


def to_block(package: str, pin: Pin) -> str:
    """Return the entry of a lock for a pin that has hashes."""
    hashes = (f"--hash={digest}" for digest in pin.hashes or ())
    return " \\\n    ".join([f"{package}=={pin.version}", *hashes]) + "\n"


def blocks(lock_text: str) -> Iterator[tuple[str, str]]:
    """(package, its lines) of every entry of a lock; comments between the entries are left out."""
    for match in re.finditer(r"^([a-z0-9][a-z0-9._-]*)==.*\n(?:[ \t]+.*\n)*", lock_text, re.MULTILINE):
        yield match[1], match[0]


def versions(lock_text: str) -> dict[str, set[str]]:
    """The versions that a lock has of every package: more than one where Pythons differ."""
    found: dict[str, set[str]] = {}
    for package, block in blocks(lock_text):
        found.setdefault(package, set()).add(
            re.split(r"[ \\;\n]", block.removeprefix(f"{package}=="), maxsplit=1)[0]
        )
    return found


def read(root: Path, name: str) -> str:
    """The text of a lock, "" where there is none."""
    return files.read_text_if_small(root / DIRECTORY / name) or ""


def _with_extras(package: str, pin: Pin) -> str:
    return f"{package}[{pin.extras}]" if pin.extras else package
