"""docs/architecture.md: its picture is what the contracts check, and what it names is there."""

import re
import statistics
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text()
CONTRACTS: list[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
    "importlinter"
]["contracts"]


def contract(beginning: str) -> dict[str, Any]:
    (found,) = (each for each in CONTRACTS if each["name"].startswith(beginning))
    return found


def pictured() -> tuple[list[set[str]], list[set[str]]]:
    """The rooms above and below the torch line, a set for each floor, from the top."""
    (picture,) = re.findall(r"^```\n(cli.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    names = (re.split(r" {2,}", line)[0] for line in picture.splitlines())
    floors = [set(name.split(" | ")) for name in names if name]  # a line that goes on begins with blanks
    (line,) = (at for at, floor in enumerate(floors) if any(name.startswith("---") for name in floor))
    return floors[:line], floors[line + 1 :]


def test_the_picture_is_what_the_contracts_check():
    above, below = pictured()
    layers = [set(layer.split(" | ")) for layer in contract("A room imports only")["layers"]]
    assert [{"__main__"}, *above, *below] == layers
    checked = {
        name.removeprefix("bundle.") for name in contract("Nothing below the torch line")["source_modules"]
    }
    assert set().union(*below) == checked - {"tools"}


def test_every_room_is_in_the_picture():
    above, below = pictured()
    there = {path.name for path in (ROOT / "bundle").iterdir() if (path / "__init__.py").is_file()}
    there |= {path.stem for path in (ROOT / "bundle").glob("*.py")} - {"__init__", "__main__"}
    assert set().union(*above, *below) == there


def test_what_a_newcomer_asks_for_is_in_the_folders_that_the_page_names():
    table = PAGE.partition("## Where is ...?")[2].partition("\n## ")[0]
    folders = re.findall(r"^\| \S.* \| `(bundle/\w+)` \|$", table, re.MULTILINE)
    assert len(set(folders)) == 10
    assert [folder for folder in folders if not (ROOT / folder / "__init__.py").is_file()] == []


def test_no_file_is_longer_than_a_reader_can_hold():
    folders = ("bundle", "tests", "tools", "benchmarks")
    lines = {
        str(path.relative_to(ROOT)): path.read_text().count("\n")
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {name: count for name, count in lines.items() if count > 600} == {}
    own = [n for name, n in lines.items() if name.startswith("bundle/") and not name.endswith("/__init__.py")]
    assert 100 <= statistics.median(own) <= 250
