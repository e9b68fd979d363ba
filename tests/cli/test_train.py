"""`mcore-bundle train`: what --dry-run prints runs, and --mcore says which megatron-core ranks import."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from bundle.environment import packages
from tests.command import SMALL, run_bundle, run_without_torch, sets

RECIPE = ("qwen3-tp2-sp", *sets(*SMALL, "train.steps=1"), "--backend=cpu")
RUN = "runs/qwen3-tp2-sp"


def installed():
    core = packages.detect().megatron.core
    if core is None or core.version is None:
        pytest.skip("megatron-core is not installed")
    return core


def tree(root: Path, version: str) -> Path:
    """A directory in which nothing of megatron-core is but its number."""
    package = root / "megatron/core"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    (package / "package_info.py").write_text(
        "".join(f"{n} = {v}\n" for n, v in numbers) + "PRE_RELEASE = ''\n"
    )
    return root


def start(printed: str, cwd: Path) -> None:
    """Runs what a dry run printed, as a person pastes it."""
    ran = subprocess.run(["sh", "-c", printed], cwd=cwd, timeout=300, capture_output=True)
    assert ran.returncode == 0, ran.stderr[-2000:]


def version(cwd: Path, run: str = RUN) -> str:
    """The number of the megatron-core that the ranks of a run imported."""
    return str(json.loads((cwd / run / "versions.json").read_text())["megatron-core"]["version"])


@pytest.mark.world
@pytest.mark.parametrize("told", ["a recipe", "a job file"])
def test_the_command_of_a_dry_run_runs(told, tmp_path):
    installed()
    words = RECIPE
    if told == "a job file":
        run_bundle("plan", *RECIPE, "--job=j.json", cwd=tmp_path, code=0)
        words = ("--job=j.json",)
    printed = run_bundle("train", *words, "--dry-run", cwd=tmp_path, code=0).stdout
    assert not (tmp_path / "runs").exists()
    start(printed, tmp_path)
    assert json.loads((tmp_path / RUN / "result.json").read_text())["step"] == 1


def test_a_dry_run_says_the_same_to_ranks_but_which_node_it_is(tmp_path):
    flags = (
        *sets("train.global_batch_size=4"),
        "--fresh",
        "--allow-drift=mtp-zero-layers",
        "--devices-per-node=2",
        "--run-directory=a b",
    )
    where = ("--nodes=2", "--node-rank=0", "--rendezvous=h:1", "--wait=7")
    planned = run_bundle("train", *RECIPE, *flags, *where, "--dry-run", cwd=tmp_path, code=0)
    first, one, second, other = planned.stdout.splitlines()
    assert (first, second) == ("# node 0 of 2", "# node 1 of 2")
    words = shlex.split(one)
    said = words[words.index("bundle") + 1 :]
    assert said == shlex.split(other)[words.index("bundle") + 1 :]
    assert said[:2] == ["train", "qwen3-tp2-sp"] and {"--fresh", "--devices-per-node"} < set(said)
    assert not {"--nodes", "--node-rank", "--rendezvous", "--dry-run"} & set(said)
    assert said[said.index("--wait") + 1] == "7" and said[said.index("--run-directory") + 1] == "a b"


def test_a_version_that_is_not_installed_is_refused_with_the_one_that_is(tmp_path):
    here = installed()
    words = ("train", *RECIPE, f"--mcore={here.version}", "--dry-run")
    assert "train" in run_bundle(*words, cwd=tmp_path, code=0).stdout
    said = run_bundle("train", *RECIPE, "--mcore=0.12.1", "--dry-run", cwd=tmp_path, code=2).stderr
    assert "--mcore 0.12.1: " in said and here.version in said and str(here.root) in said


def test_a_version_is_refused_where_none_is_installed(tmp_path, messages):
    said = run_without_torch("train", *RECIPE, "--mcore=0.12.1", "--dry-run", cwd=tmp_path, code=2).stderr
    assert "--mcore 0.12.1: " in said
    messages(said)


def test_a_tree_is_planned_for_and_one_that_ranks_would_not_import_is_refused(tmp_path, messages):
    tree(tmp_path / "tree", "0.12.1")
    # An empty tree lacks what patches are for, which the decision about it says.
    said = run_bundle("train", *RECIPE, "--mcore=tree", "--dry-run", cwd=tmp_path, code=4).stderr
    assert re.search("DRIFT|drift", said)
    tree(tmp_path / "here", "0.13.1")
    said = run_bundle("train", *RECIPE, "--mcore=../tree", "--dry-run", cwd=tmp_path / "here", code=2).stderr
    assert "--mcore ../tree: " in said and f"{tmp_path / 'here'} " in said
    messages(said)


@pytest.mark.world
@pytest.mark.slow
def test_ranks_import_the_tree_that_was_named(tmp_path):
    here = installed()
    package = shutil.copytree(here.package, tmp_path / "elsewhere/megatron")
    numbers = package / "core/package_info.py"
    numbers.write_text(re.sub("^PATCH = .*$", "PATCH = 77", numbers.read_text(), flags=re.MULTILINE))
    run_bundle("train", *RECIPE, "--mcore=elsewhere", cwd=tmp_path, code=0)
    assert version(tmp_path).endswith(".77")
    # The same by the command that anybody may start.
    again = ("train", *RECIPE, "--mcore=elsewhere", "--run-directory=again", "--dry-run")
    start(run_bundle(*again, cwd=tmp_path, code=0).stdout, tmp_path)
    assert version(tmp_path, "again") == version(tmp_path)
