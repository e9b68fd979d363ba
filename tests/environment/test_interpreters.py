"""Another environment's search path, read from its files, against what its own interpreter says."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from bundle.environment import interpreters
from bundle.environment.interpreters import reconstruct_search_path
from bundle.environment.packages import find_megatron
from bundle.errors import UsageError
from tests.environment.test_megatron import ASK, CASES, answer, case, tree

RELEASE = f"{sys.version_info.major}.{sys.version_info.minor}"
# The current directory is the program's, which nobody knows before it is started.
ELSEWHERE = [name for name in CASES if name != "the current directory first"]


def environment(root: Path, *, system: bool = False) -> Path:
    """A real environment without pip; returns its python."""
    venv.create(root, system_site_packages=system, symlinks=True)
    return root / "bin/python"


def searched(python: Path) -> list[str]:
    """Where that interpreter itself looks for packages that are installed."""
    says = "import json, sys; print(json.dumps(sys.path[1:]))"
    ran = subprocess.run([python, "-c", says], capture_output=True, text=True, timeout=60, check=True)
    own = Path(sys.base_prefix, "lib")
    library = {str(own / f"python{RELEASE}"), str(own / f"python{RELEASE}/lib-dynload")}
    found = [path for path in json.loads(ran.stdout) if path not in library and not path.endswith(".zip")]
    return [path for path in dict.fromkeys(found) if Path(path).is_dir()]


@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("by", ["python", "directory"])
def test_the_directories_are_those_that_the_interpreter_has(
    system: bool, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "first"))
    (tmp_path / "first").mkdir()
    (tmp_path / "checkout").mkdir()
    python = environment(tmp_path / "env", system=system)
    (tmp_path / f"env/lib/python{RELEASE}/site-packages/own.pth").write_text(f"{tmp_path / 'checkout'}\n")
    named = python if by == "python" else tmp_path / "env"
    found = reconstruct_search_path(str(named))
    expected = searched(python)
    assert str(tmp_path / "checkout") in expected
    assert [str(path) for path in found.list_directories() if path.is_dir()] == expected


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_winner_is_the_one_that_python_imports_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    paths, cwd = case(name, tmp_path)
    packages = tmp_path / f"env/lib/python{RELEASE}"
    packages.mkdir(parents=True)
    (packages / "site-packages").symlink_to(paths[-1])
    (tmp_path / "env/pyvenv.cfg").write_text(f"home = {sys.base_prefix}/bin\nversion = {RELEASE}.1\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths[:-1])))
    found = find_megatron(reconstruct_search_path(str(tmp_path / "env")))
    halves = [str(half.package) if half else None for half in (found.core, found.training)]
    assert [half and os.path.realpath(half) for half in halves] == [
        half and os.path.realpath(half) for half in answer(ASK, paths, cwd)
    ]


def test_the_finders_of_this_interpreter_are_not_asked_about_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None) -> None:
            raise AssertionError(f"asked for {name}")

    Finder.__module__ = "__editable___megatron_core_finder"
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    monkeypatch.setenv("PYTHONPATH", "")
    assert find_megatron(reconstruct_search_path(str(environment(tmp_path / "env")))).core is None


@pytest.mark.parametrize(
    "named", ["nowhere", "x" * 5000, "\0", "empty"], ids=["absent", "long", "NUL", "empty"]
)
def test_what_is_no_environment_is_refused(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"^--env ") as error:
        reconstruct_search_path(named)
    messages(error.value)


def test_the_active_environment_is_the_one_around_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    other = environment(tmp_path / "env")
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.prefix) / "bin"), str(other.parent)]))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    assert interpreters.find_other_environment() == str(other.parent / "python3")
    monkeypatch.setenv("VIRTUAL_ENV", str(tree(tmp_path / "another", "core")))
    assert interpreters.find_other_environment() == str(tmp_path / "another")
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    assert interpreters.find_other_environment() == str(other.parent / "python3")
