"""What --from may name."""

from pathlib import Path

import pytest

from bundle.checkpoints import manifest
from bundle.checkpoints.directory import CheckpointDirectory
from bundle.errors import UsageError
from bundle.launch import Start
from bundle.recipe import load
from bundle.runs.directory import RunDirectory, starting_checkpoint


@pytest.fixture
def run(tmp_path: Path) -> Path:
    kept = CheckpointDirectory(tmp_path / "run" / "checkpoints")
    for step in (10, 30, 20):
        manifest.write(kept.start(step), {})
        kept.publish(step, keep=9)
    return tmp_path / "run"


def test_a_run_or_its_checkpoints_mean_the_newest_and_a_checkpoint_itself(run, tmp_path):
    newest = run / "checkpoints" / "step-00000030"
    assert (
        starting_checkpoint(run)
        == starting_checkpoint(run / "checkpoints")
        == starting_checkpoint(newest)
        == newest
    )
    assert starting_checkpoint(run / "checkpoints" / "step-00000010") == run / "checkpoints" / "step-00000010"
    elsewhere = tmp_path / "mine"
    newest.rename(elsewhere)
    assert starting_checkpoint(elsewhere) == elsewhere


def test_from_counts_until_the_run_has_a_checkpoint_of_its_own_and_in_a_fresh_start(run, tmp_path):
    recipe, newest = load("demo"), run / "checkpoints" / "step-00000030"
    start = Start(origin=run)
    assert (
        RunDirectory(tmp_path / "new")
        .beginning(recipe, start)
        .described.startswith(f"{newest}: weights, opt")
    )
    alone = start.model_copy(update={"weights_only": True})
    assert (
        RunDirectory(tmp_path / "new")
        .beginning(recipe, alone)
        .described.startswith(f"the weights of {newest};")
    )
    assert RunDirectory(run).beginning(recipe, start).described == "the run's own newest checkpoint"
    fresh = start.model_copy(update={"fresh": True})
    assert RunDirectory(run).beginning(recipe, fresh).described.startswith(f"{newest}: ")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere", "there is no such checkpoint"),
        ("empty", "neither a checkpoint that mcore-bundle wrote"),
        ("a-file", "neither a checkpoint that mcore-bundle wrote"),
    ],
)
def test_anything_else_is_refused(tmp_path, name, why):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a-file").touch()
    with pytest.raises(UsageError, match=f"--from {tmp_path / name}: {why}"):
        starting_checkpoint(tmp_path / name)
