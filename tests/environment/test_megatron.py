"""Which megatron wins, against what Python itself imports."""

import json
import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

import bundle
from bundle.environment import packages
from bundle.environment.search import build_search_path

ASK = (
    "import importlib.util, json, os\n"
    "def package(name):\n"
    "    try: spec = importlib.util.find_spec(name)\n"
    "    except ModuleNotFoundError: return None\n"
    "    return spec and os.path.dirname(next(iter(spec.submodule_search_locations)))\n"
    "print(json.dumps([package('megatron.core'), package('megatron.training')]))\n"
)

FINDER = """
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location

MAPPING: dict[str, str] = {mapping!r}
NAMESPACES: dict[str, list[str]] = {namespaces!r}
PLACEHOLDER = "__editable__.megatron_core.finder.__path_hook__"


class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in MAPPING:
            return spec_from_file_location(name, MAPPING[name] + "/__init__.py")


class Namespaces:
    @classmethod
    def hook(cls, path):
        if path == PLACEHOLDER:
            return cls
        raise ImportError

    @classmethod
    def find_spec(cls, name, target=None):
        if name in NAMESPACES:
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [*NAMESPACES[name], PLACEHOLDER]
            return spec


sys.meta_path.append(Finder)
if NAMESPACES:
    sys.path_hooks.append(Namespaces.hook)
    sys.path.append(PLACEHOLDER)
"""


def tree(root: Path, *halves: str, version: str = "0.16.1", regular: bool = False) -> Path:
    for half in halves:
        (root / "megatron" / half).mkdir(parents=True)
        (root / "megatron" / half / "__init__.py").touch()
    if "core" in halves:
        major, minor, patch = version.split(".")
        info = f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ''\n"
        (root / "megatron/core/package_info.py").write_text(info)
    if regular:
        (root / "megatron/__init__.py").touch()
    return root


def editable(site: Path, checkout: Path, namespaces: dict[str, list[str]]) -> Path:
    mapping = {"megatron.core": str(checkout / "megatron/core")}
    finder = "__editable___megatron_core_0_16_1_finder"
    (site / f"{finder}.py").write_text(FINDER.format(mapping=mapping, namespaces=namespaces))
    (site / "__editable__.megatron_core-0.16.1.pth").write_text(f"import {finder}\n")
    return site


ASK_US = (
    f"own = {[str(Path(bundle.__file__).parents[1]), *site.getsitepackages()]!r}\n"
    "import json; sys.path += own\n"
    "from bundle.environment import packages, search\n"
    "del sys.path[-len(own):]\n"
    "found = packages.find_megatron(search.build_worker_path())\n"
    "print(json.dumps([str(half.package) if half else None for half in (found.core, found.training)]))\n"
)


def answer(script: str, paths: list[Path], cwd: Path) -> list[str | None]:
    """What a script prints in an interpreter whose search path has these, with what their .pth files do."""
    setting = "import site, sys; [site.addsitedir(p) for p in sys.path[:] if p.endswith('site')]\n"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-S", "-c", setting + script]
    ran = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    said: list[str | None] = json.loads(ran.stdout)
    return said


def case(name: str, tmp: Path) -> tuple[list[Path], Path]:
    a, b, site, cwd = tmp / "a", tmp / "b", tmp / "site", tmp / "cwd"
    site.mkdir()
    cwd.mkdir()
    if name == "nothing":
        a.mkdir()
    elif name == "first of two":
        tree(a, "core"), tree(b, "core")
    elif name == "halves from two trees":
        tree(a, "core"), tree(b, "core", "training")
    elif name == "the current directory first":
        tree(a, "core"), tree(cwd, "core")
    elif name == "a regular package hides earlier portions":
        tree(a, "core"), tree(b, "core", "training", regular=True)
    elif name == "a portion without an init loses":
        (a / "megatron/core").mkdir(parents=True)
        tree(b, "core")
    elif name == "path file":
        (site / "checkout.pth").write_text(f"{tree(tmp / 'checkout', 'core', 'training')}\n")
    elif name == "editable":
        editable(site, tree(tmp / "checkout", "core", "training"), {"megatron": []})
    elif name == "editable beside a portion":
        editable(site, tree(tmp / "checkout", "core"), {"megatron": []})
        tree(a, "training")
    elif name == "editable behind a copy":
        editable(site, tree(tmp / "checkout", "core"), {"megatron": []})
        tree(a, "core")
    elif name == "editable namespace with a portion of its own":
        checkout = tree(tmp / "checkout", "core", "training")
        editable(site, checkout, {"megatron": [str(checkout / "megatron")]})
    return [a, b, site], cwd


CASES = [
    "nothing",
    "first of two",
    "halves from two trees",
    "the current directory first",
    "a regular package hides earlier portions",
    "a portion without an init loses",
    "path file",
    "editable",
    "editable beside a portion",
    "editable behind a copy",
    "editable namespace with a portion of its own",
]


@pytest.mark.parametrize("name", CASES)
def test_the_winner_is_the_one_that_python_imports(name: str, tmp_path: Path):
    paths, cwd = case(name, tmp_path)
    assert answer(ASK_US, paths, cwd) == answer(ASK, paths, cwd)


@pytest.mark.parametrize("regular", [False, True])
def test_nothing_of_a_tree_on_the_path_is_executed(tmp_path: Path, regular: bool):
    found = tree(tmp_path / "a", "core", "training", regular=regular)
    for file in found.rglob("__init__.py"):
        file.write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nraise SystemExit(1)\n")
    winner = packages.find_megatron(build_search_path([str(found)], "", tmp_path)).core
    assert winner is not None and winner.root == found
    assert not (tmp_path / "executed").exists()


def test_a_finder_that_is_not_of_an_editable_install_is_not_asked(tmp_path: Path, monkeypatch):
    class Hook:
        @staticmethod
        def find_spec(name, path=None, target=None):
            pytest.fail(f"asked for {name}")

    monkeypatch.setattr(sys, "meta_path", [Hook, *sys.meta_path, Hook])
    assert packages.find_megatron(build_search_path([str(tmp_path)], "", tmp_path)).core is None


def test_every_copy_is_listed_with_its_origin(tmp_path: Path):
    a, b, cwd = tree(tmp_path / "a", "core"), tree(tmp_path / "b", "core", version="0.19.2"), tmp_path
    found = packages.find_megatron(build_search_path([str(a), str(b)], str(b), cwd))
    assert [(copy.version, copy.origin) for copy in found.copies] == [
        ("0.16.1", "sys.path"),
        ("0.19.2", "PYTHONPATH"),
    ]
    assert found.core_training_mismatch is None


def test_two_trees_are_a_conflict_that_names_both(tmp_path: Path):
    a, b = tree(tmp_path / "a", "core"), tree(tmp_path / "b", "core", "training", version="0.18.0")
    found = packages.find_megatron(build_search_path([str(a), str(b)], "", tmp_path / "none"))
    assert found.core_training_mismatch is not None
    assert (
        str(a) in found.core_training_mismatch
        and str(b) in found.core_training_mismatch
        and "0.18.0" in found.core_training_mismatch
    )


@pytest.mark.parametrize("inside", ["", "megatron", "megatron/core"])
def test_a_named_tree_is_found_from_any_of_its_directories(tmp_path: Path, inside: str):
    copy = packages.find_copy(tree(tmp_path, "core", version="0.14.0") / inside)
    assert copy is not None and copy.version == "0.14.0" and copy.root == tmp_path


@pytest.mark.parametrize("info", ["", "MAJOR = (", "MAJOR = 1", "MAJOR = MINOR = PATCH = PRE_RELEASE = []"])
def test_a_package_info_that_says_nothing_gives_no_version(tmp_path: Path, info: str):
    (tree(tmp_path, "core") / "megatron/core/package_info.py").write_text(info)
    copy = packages.find_copy(tmp_path)
    assert copy is not None and copy.version is None


def test_a_pipe_in_the_place_of_a_source_file_is_not_waited_for(tmp_path: Path):
    info = tree(tmp_path, "core") / "megatron/core/package_info.py"
    info.unlink()
    os.mkfifo(info)
    copy = packages.find_copy(tmp_path)
    assert copy is not None and copy.version is None


def test_releases_say_their_version(release_trees: dict[str, Path]):
    for version, root in release_trees.items():
        copy = packages.find_copy(root)
        assert copy is not None and copy.version == version
