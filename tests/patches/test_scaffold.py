"""The files that a new patch starts from fit the project, and fail until they are filled in."""

import importlib.util
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from bundle.errors import UsageError
from bundle.patches.scaffold import create_bundle_patch_files

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "bundle/patches/catalogue").mkdir(parents=True)
    return tmp_path


def loaded(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_files_are_a_patch_whose_replacement_and_check_are_there(checkout: Path):
    steps = create_bundle_patch_files("mtp-new-defect", checkout)
    (patch,) = loaded(checkout / "bundle/patches/catalogue/mtp_new_defect.py").PATCHES
    assert patch.id == "mtp-new-defect"
    module, _, name = patch.replacements[0].wrapper.partition(":")
    wrapper = getattr(loaded(checkout / f"{module.replace('.', '/')}.py"), name)
    assert wrapper(lambda self, a, b: (a, b))(None, 1, b=2) == (1, 2)  # until it mends something
    measurement = checkout / "bundle/verification/measurements/mtp_new_defect.py"
    assert "def distance(" in measurement.read_text()
    for file in checkout.rglob("*.py"):
        assert str(file.relative_to(checkout)) in steps


def test_what_the_steps_name_is_there(checkout: Path):
    """Files, commands and names; what is new apart."""
    steps = create_bundle_patch_files("mtp-new-defect", checkout)
    named = set(re.findall(r"(?:bundle|tests|docs)/[\w/]+\.(?:py|md)", steps))
    assert all((checkout / name).is_file() or (REPOSITORY / name).is_file() for name in named)
    assert all(find_spec(name) for name in re.findall(r"python -m ([\w.]+)", steps))
    for name, place in (
        ("CHECKS_BY_PATCH_ID", "bundle/verification/check.py"),
        ("PRESENT", "tests/history/truth.py"),
    ):
        assert name in steps and f"{name}" in (REPOSITORY / place).read_text()


@pytest.mark.parametrize("words", [["format", "--check"], ["check", "--no-cache"]])
def test_the_files_are_formatted_and_sorted_like_the_project(checkout: Path, words: list[str]):
    create_bundle_patch_files("mtp-new-defect", checkout)
    files = [str(file) for file in checkout.rglob("*.py")]
    settings = str(REPOSITORY / "pyproject.toml")
    command = [sys.executable, "-m", "ruff", *words, "--config", settings]
    ran = subprocess.run([*command, *files], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


@pytest.mark.parametrize("patch_id", ["", "Mla", "mla_x", "../mla", "mla--x", "mla-thd-value-padding"])
def test_an_id_that_is_none_or_taken_is_refused(checkout: Path, patch_id: str):
    with pytest.raises(UsageError):
        create_bundle_patch_files(patch_id, checkout)


def test_nothing_is_overwritten(checkout: Path, messages):
    create_bundle_patch_files("mtp-new-defect", checkout)
    with pytest.raises(UsageError) as error:
        create_bundle_patch_files("mtp-new-defect", checkout)
    files = {str(file.relative_to(checkout)) for file in checkout.rglob("*.py")}
    assert set(error.value.violations) == files
    messages(error.value)


def test_elsewhere_than_in_a_checkout_nothing_is_written(tmp_path: Path, messages):
    with pytest.raises(UsageError) as error:
        create_bundle_patch_files("mtp-new-defect", tmp_path)
    messages(error.value)
    assert not list(tmp_path.iterdir())
