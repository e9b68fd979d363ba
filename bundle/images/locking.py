"""The lock of a stack: made by `uv pip compile` from one input file, with a hash for every file.

Only this module runs a tool. uv reads the index that its environment names; the lock names none, so that it
holds wherever the same files are served.
"""

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bundle.errors import EnvironmentUnfit, UsageError
from bundle.images.definition import Definition, Pin
from bundle.images.project import Project
from bundle.stack import text

DIRECTORY = Path("images/locks")


def input_text(definition: Definition, project: Project, name: str) -> str:
    """The text of STACK.in: every pin with its reason, and what the package itself requires."""
    stack = definition.stack(name)
    backend = definition.backends[stack.backend]
    lines = [f"# Made from docker-bake.json and pyproject.toml by `mcore-bundle images lock {name}`."]
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
    target.write_text(f"# Made from {source.name} by `mcore-bundle images lock {name}`.\n{kept}")
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
            others.append(
                " \\\n    ".join([f"{package}=={pin.version}", *(f"--hash={h}" for h in pin.hashes)]) + "\n"
            )
        else:
            others.append(block)
    return "".join(kept), "".join(others)


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
    return text.read(root / DIRECTORY / name) or ""


def _with_extras(package: str, pin: Pin) -> str:
    return f"{package}[{pin.extras}]" if pin.extras else package
