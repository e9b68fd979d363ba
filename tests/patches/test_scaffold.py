"""The files that a new patch starts from fit the project, and fail until they are filled in."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from bundle.errors import UsageError
from bundle.patches.scaffold import create

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "bundle/patches/catalogue").mkdir(parents=True)
    return tmp_path


def test_the_entry_is_a_patch_and_the_test_fails(checkout: Path):
    assert "bundle/patches/catalogue/mtp_new_defect.py" in create("mtp-new-defect", checkout)
    file = checkout / "bundle/patches/catalogue/mtp_new_defect.py"
    spec = importlib.util.spec_from_file_location("entry", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (patch,) = module.PATCHES
    assert patch.id == "mtp-new-defect" and not patch.why
    test = checkout / "tests/upstream/test_mtp_new_defect.py"
    ran = subprocess.run([sys.executable, "-m", "pytest", "-q", str(test)], cwd=checkout, capture_output=True)
    assert ran.returncode == 1


def test_the_files_are_formatted_like_the_project(checkout: Path):
    create("mtp-new-defect", checkout)
    files = [str(file) for file in checkout.rglob("*.py")]
    settings = str(REPOSITORY / "pyproject.toml")
    command = [sys.executable, "-m", "ruff", "format", "--check", "--config", settings]
    ran = subprocess.run([*command, *files], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


@pytest.mark.parametrize("patch_id", ["", "Mla", "mla_x", "../mla", "mla--x", "mla-thd-value-padding"])
def test_an_id_that_is_none_or_taken_is_refused(checkout: Path, patch_id: str):
    with pytest.raises(UsageError):
        create(patch_id, checkout)


def test_nothing_is_overwritten(checkout: Path):
    create("mtp-new-defect", checkout)
    with pytest.raises(UsageError, match="already"):
        create("mtp-new-defect", checkout)


def test_elsewhere_than_in_a_checkout_nothing_is_written(tmp_path: Path):
    with pytest.raises(UsageError, match="no checkout"):
        create("mtp-new-defect", tmp_path)
    assert not list(tmp_path.iterdir())
