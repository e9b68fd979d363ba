"""What --from may name."""

from pathlib import Path

import pytest

from bundle.architectures.identity import dump_architecture
from bundle.checkpoints import manifest, state
from bundle.checkpoints.directory import CheckpointDirectory
from bundle.errors import ExitCode, UsageError
from bundle.launch import Start
from bundle.recipe import Recipe, load
from bundle.runs.directory import Origin, RunDirectory, find_starting_checkpoint


def kept_by(root: Path, recipe: Recipe, *steps: int, loaded: bool = False) -> Path:
    """A run that has these checkpoints of a recipe's model, without their tensors."""
    root.mkdir(exist_ok=True)
    kept = CheckpointDirectory(root / "checkpoints")
    for step in steps:
        place = kept.create_sole_partial(step)
        state.SavedState(
            state=state.TrainState(step, 0, "digest"),
            scheduler={},
            layout={},
            sharding="",
            optimizer=state.describe_optimizer_state_format(recipe.optimizer),
            mcore="",
            model=dump_architecture(recipe.architecture),
            adapters=state.describe_adapters(recipe, loaded=loaded),
        ).write(place)
        manifest.write(place, {})
        kept.publish(step, keep=9)
    return root


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return kept_by(tmp_path / "run", load("demo"), 10, 30, 20)


def test_a_run_or_its_checkpoints_mean_the_newest_and_a_checkpoint_itself(run, tmp_path):
    newest = run / "checkpoints" / "step-00000030"
    assert (
        find_starting_checkpoint(run)
        == find_starting_checkpoint(run / "checkpoints")
        == find_starting_checkpoint(newest)
        == newest
    )
    assert (
        find_starting_checkpoint(run / "checkpoints" / "step-00000010")
        == run / "checkpoints" / "step-00000010"
    )
    elsewhere = tmp_path / "mine"
    newest.rename(elsewhere)
    assert find_starting_checkpoint(elsewhere) == elsewhere


def test_from_counts_until_the_run_has_a_checkpoint_of_its_own_and_in_a_fresh_start(run, tmp_path, messages):
    recipe, newest = load("demo"), run / "checkpoints" / "step-00000030"
    start = Start(origin=run)
    alone, fresh = (start.model_copy(update={flag: True}) for flag in ("weights_only", "fresh"))
    for directory, how, names_origin in (
        (tmp_path / "new", start, True),
        (tmp_path / "new", alone, True),
        (run, start, False),
        (run, fresh, True),
    ):
        description = RunDirectory(directory).find_initial_weights(recipe, how).description
        assert (str(newest) in description) == names_origin
        messages(description)


def test_a_run_goes_on_with_the_checkpoint_that_it_began_with(run, tmp_path, messages):
    """What --from names may have gone on since, or been begun anew."""
    recipe, start, new = load("demo"), Start(origin=run), RunDirectory(tmp_path / "new")
    new.remove_results_and_write_start(recipe, {}, {}, Origin.from_start(start))
    first, told = run / "checkpoints" / "step-00000030", new.read_origin_digest()
    assert new.find_origin_checkpoint() == first and told
    kept_by(run, recipe, 40)
    assert new.find_origin_checkpoint() == first and new.read_origin_digest() == told
    assert new.find_initial_weights(recipe, start).description.startswith(f"{first}: ")
    fresh = start.model_copy(update={"fresh": True})
    assert new.find_initial_weights(recipe, fresh).description.startswith(
        f"{run}/checkpoints/step-00000040: "
    )
    manifest.write(first, {"another": "0" * 64})
    with pytest.raises(UsageError, match=f"{first}: .*{new.root} ") as error:
        new.find_origin_checkpoint()
    messages(error.value)
    (first / manifest.FILE_NAME).unlink()
    with pytest.raises(UsageError, match=f"{first}: ") as error:
        new.find_origin_checkpoint()
    messages(error.value)


LORA = ("model.lora={rank: 2, alpha: 4, targets: [o_proj]}", "model.mtp.layers=0")
SGD = "optimizer={name: sgd, lr: 0.1}"


@pytest.mark.parametrize(
    ("before", "after", "alone", "named"),
    [
        (("model.config.num_hidden_layers=3",), (), True, "num_layers: 3 "),
        (("model.config.rms_norm_eps=0.1",), (), True, "norm_epsilon: 0.1 "),
        (LORA, ("model.mtp.layers=0",), True, "alpha: 4.0"),
        (LORA, (LORA[0].replace("rank: 2", "rank: 3"), LORA[1]), True, "rank: 3"),
        (LORA, (*LORA, "seed=5"), True, "seed 5"),
        ((SGD,), (), False, "sgd"),
        ((), ("train.steps=30",), False, "30"),
    ],
    ids=["layers", "epsilon", "no-lora", "rank", "seed", "optimizer", "steps"],
)
def test_what_a_rank_would_refuse_a_plan_refuses(tmp_path, before, after, alone, named, messages):
    """By what the checkpoint says of itself: on a cluster a rank would say it behind the queue."""
    run = kept_by(tmp_path / "run", load("demo", before), 30)
    new = RunDirectory(tmp_path / "new")

    def problems(recipe: Recipe, *, weights_only: bool) -> str:
        found = new.find_initial_weights(recipe, Start(origin=run, weights_only=weights_only))
        assert bool(found.problems) is not bool(found.description)
        assert all(problem.code is ExitCode.USAGE for problem in found.problems)
        return "\n".join(problem.text for problem in found.problems)

    for weights_only in (True, False):
        said = problems(load("demo", after), weights_only=weights_only)
        assert (named in said) if alone or not weights_only else not said
        assert not problems(load("demo", before), weights_only=weights_only)
    messages(said)


def test_a_checkpoint_that_says_nothing_of_itself_is_refused(run, tmp_path, messages):
    (run / "checkpoints" / "step-00000030" / "state.json").write_text("{")
    (found,) = RunDirectory(tmp_path / "new").find_initial_weights(load("demo"), Start(origin=run)).problems
    assert "step-00000030: " in found.text and "state.json" in found.text
    messages(found.text)


@pytest.mark.parametrize("name", ["nowhere", "empty", "a-file"])
def test_anything_else_is_refused(tmp_path, name, messages):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a-file").touch()
    with pytest.raises(UsageError, match=f"--from {tmp_path / name}: ") as error:
        find_starting_checkpoint(tmp_path / name)
    messages(error.value)
