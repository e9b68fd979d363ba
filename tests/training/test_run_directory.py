import json
import subprocess
import sys
from pathlib import Path

import pytest

from bundle.errors import UsageError
from bundle.recipe import Recipe, load
from bundle.training.run_directory import RunDirectory

ROOT = Path(__file__).parents[2]


def recipe(*overrides: str) -> Recipe:
    return load("demo", overrides)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "demo")


def finish(run: RunDirectory) -> None:
    run.result.write_text("{}")


def test_a_new_directory_begins_and_an_unfinished_one_goes_on(run):
    assert not run.begin(recipe(), fresh=False, resume=False)
    assert not run.root.exists(), "looking changes nothing"
    run.write_start(recipe(), {"patches": []}, {"torch": "2"})
    assert run.begin(recipe(), fresh=False, resume=False)
    assert json.loads(run.plan.read_text()) == {"patches": []}


def test_every_built_in_recipe_reads_back_as_itself(run):
    from bundle.recipe import builtin

    for name in builtin.names():
        run.write_start(load(name), {}, {})
        assert run.begin(load(name), fresh=False, resume=True)


def test_a_finished_run_is_not_overwritten_by_accident(run):
    run.write_start(recipe(), {}, {})
    finish(run)
    with pytest.raises(UsageError, match="finished; --fresh overwrites it, --resume"):
        run.begin(recipe(), fresh=False, resume=False)
    assert not run.begin(recipe(), fresh=True, resume=False)
    assert run.begin(recipe(), fresh=False, resume=True)


def test_a_changed_recipe_is_refused_key_by_key(run):
    run.write_start(recipe(), {}, {})
    with pytest.raises(UsageError) as refused:
        run.begin(recipe("optimizer.lr=0.5", "seed=7", "checkpoint.keep=9"), fresh=False, resume=True)
    assert any("optimizer.lr" in line and "0.5" in line for line in refused.value.violations)
    assert any(line.startswith("seed:") for line in refused.value.violations)
    assert len(refused.value.violations) == 2
    assert not run.begin(recipe("seed=7"), fresh=True, resume=False)


def test_flags_that_make_no_sense_are_refused(run):
    with pytest.raises(UsageError, match="no run to resume"):
        run.begin(recipe(), fresh=False, resume=True)
    with pytest.raises(UsageError, match="one of them"):
        run.begin(recipe(), fresh=True, resume=True)


def test_a_fresh_start_keeps_nothing_of_the_old_run_but_logs(run):
    run.write_start(recipe(), {}, {})
    finish(run)
    for path in (run.checkpoints / "step-00000001" / "x", run.tensorboard / "e", run.logs / "1"):
        path.parent.mkdir(parents=True)
        path.write_text("old")
    run.metrics.write_text("{}\n")
    run.write_start(recipe("seed=7"), {}, {})
    kept = sorted(path.name for path in run.root.iterdir())
    assert kept == ["logs", "plan.json", "recipe.yaml", "versions.json"]


def test_a_start_that_was_interrupted_is_no_run(run, monkeypatch):
    run.write_start(recipe(), {}, {})
    with pytest.raises(TypeError):
        run.write_start(recipe(), {"plan": object()}, {})
    assert not run.begin(recipe("seed=7"), fresh=False, resume=False)


def test_metrics_after_the_resumed_step_are_taken_out(run):
    run.root.mkdir()
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (10, 20, 30)]
    run.metrics.write_text("\n".join([*lines, '{"step": 3']))
    run.rewind_metrics(20)
    assert run.metrics.read_text().splitlines() == lines[:2]


HOLD = """
import sys
from pathlib import Path
from bundle.training.run_directory import RunDirectory
with RunDirectory(Path(sys.argv[1])).locked():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_runs_cannot_use_one_directory_and_a_killed_one_lets_go(run):
    command = [sys.executable, "-c", HOLD, str(run.root)]
    pipe = subprocess.PIPE
    holder = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    try:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(UsageError, match=f"another run is using it .process {holder.pid} on "),
            run.locked(),
        ):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with run.locked():
        pass
