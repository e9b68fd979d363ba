"""Copies of what the images are made from, for tests that change them."""

import json
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[3]
PARTS = (
    "docker-bake.json",
    "docker-bake.hcl",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "images",
    "docs",
    "bundle/targets/images.json",
)


def copied(directory: Path) -> Path:
    """A checkout with what the images are made from, and one module of the package and of the tools."""
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, directory / part)
        else:
            (directory / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, directory / part)
    (directory / "tools/images").mkdir(parents=True)
    shutil.copy(ROOT / "tools/images/identity.py", directory / "tools/images")
    shutil.copy(ROOT / "bundle/errors.py", directory / "bundle")
    return directory


def change(root: Path, *keys: str, value: object) -> None:
    """Sets one value of docker-bake.json: `change(root, "STACKS", "cpu", "pins", ..., value=...)`."""
    document = json.loads((root / "docker-bake.json").read_text())
    variable, *rest, last = keys
    place = document["variable"][variable]["default"]
    for key in rest:
        place = place[key]
    place[last] = value
    (root / "docker-bake.json").write_text(json.dumps(document))
