"""The digest of everything that an image is made from: two nodes with equal digests run equal images.

Contents and paths only: neither times, nor modes, nor where the checkout lies.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from bundle.errors import UsageError
from bundle.images.definition import Definition
from bundle.images.targets import Target
from bundle.stack import text

PACKAGE = (".py", ".json", ".yaml")  # what of bundle/ and launch/recipes goes into the wheel
ALWAYS = ("docker-bake.hcl", ".dockerignore", "pyproject.toml", "README.md", "LICENSE")
LARGEST = 64 << 20


def fingerprint(root: Path, definition: Definition, target: Target) -> str:
    """ "sha256:..." of the target's entry in the definition and of all its files."""
    digest = hashlib.sha256()
    digest.update(json.dumps(_entry(definition, target), sort_keys=True).encode())
    for file in files(root, target):
        content = text.read_bytes(file, LARGEST)
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
    for folder in ("bundle", "launch/recipes"):
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
