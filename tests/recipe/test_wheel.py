"""A wheel holds the recipes of launch/recipes, and nothing that only maintains the repository."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bundle.recipe import find_recipe, list_built_in, loading

ROOT = Path(__file__).parents[2]


def test_the_package_finds_the_files_of_launch_recipes():
    assert loading.RECIPE_DIRECTORY.resolve() == ROOT / "launch" / "recipes"
    assert list_built_in() == sorted(p.stem for p in (ROOT / "launch" / "recipes").glob("*.yaml"))


def test_a_wheel_built_from_the_checkout_holds_the_same_files(tmp_path):
    pytest.importorskip("setuptools")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("bundle", "launch", "tools"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = "from setuptools.build_meta import build_wheel; print(build_wheel(__import__('sys').argv[1]))"
    command = [sys.executable, "-c", build, str(tmp_path)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    recipes = "bundle/recipe/recipes"
    with zipfile.ZipFile(wheel) as archive:
        folders = {name.partition("/")[0] for name in archive.namelist()}
        assert {folder for folder in folders if not folder.endswith(".dist-info")} == {"bundle"}
        for name in list_built_in():
            assert archive.read(f"{recipes}/{name}.yaml") == find_recipe(name).read_bytes()
        for file in (ROOT / "launch" / "recipes" / "data").iterdir():
            assert archive.read(f"{recipes}/data/{file.name}") == file.read_bytes()
