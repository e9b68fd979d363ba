import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bundle.errors import UsageError
from bundle.launch import Start
from bundle.recipe import Recipe, load
from bundle.recipe.document import to_yaml
from bundle.runs import directory
from bundle.runs.directory import DirectoryInUse, Origin, RunDirectory
from tests.command import capture_bundle

ROOT = Path(__file__).parents[2]


def recipe(*overrides: str) -> Recipe:
    return load("demo", overrides)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "demo")


def finish(run: RunDirectory, step: int = 300) -> None:
    run.result.write_text(json.dumps({"step": step}))


def begin(run: RunDirectory, *overrides: str, **flags: Any) -> bool:
    return run.decide_resume(recipe(*overrides), Start(**flags))


def train(run: RunDirectory) -> None:
    """What a run has that was interrupted between two checkpoints."""
    run.remove_results_and_write_start(recipe(), {}, {})
    for path in (run.checkpoints / "step-00000001" / "x", run.tensorboard / "events.out.tfevents.1"):
        path.parent.mkdir(parents=True)
        path.write_text("old")
    run.metrics.write_text('{"step": 1}\n')


def everything(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_new_directory_begins_and_an_unfinished_one_goes_on(run):
    assert not begin(run)
    assert not run.root.exists(), "looking changes nothing"
    run.remove_results_and_write_start(recipe(), {"patches": []}, {"torch": "2"})
    run.metrics.write_text('{"step": 1}\n')
    assert begin(run)
    assert json.loads(run.job.read_text()) == {"patches": []}


def test_every_built_in_recipe_reads_back_as_itself(run):
    from bundle.recipe import list_built_in

    for name in list_built_in():
        run.remove_results_and_write_start(load(name), {}, {})
        assert run.decide_resume(load(name), Start(resume=True))


def test_a_finished_run_is_not_overwritten_by_accident(run, messages):
    run.remove_results_and_write_start(recipe(), {}, {})
    finish(run)
    with pytest.raises(UsageError, match=r"--fresh .*--resume") as error:
        begin(run)
    messages(error.value)
    assert not begin(run, fresh=True)
    assert begin(run, resume=True)


def test_a_changed_recipe_is_refused_key_by_key(run, messages):
    train(run)
    with pytest.raises(UsageError) as refused:
        begin(run, "optimizer.lr=0.5", "seed=7", "checkpoint.keep=9", resume=True)
    assert any("optimizer.lr" in line and "0.5" in line for line in refused.value.violations)
    assert any(line.startswith("seed:") for line in refused.value.violations)
    assert len(refused.value.violations) == 2
    messages(refused.value)
    assert not begin(run, "seed=7", fresh=True)


@pytest.mark.parametrize("flags", [{"resume": True}, {"fresh": True, "resume": True}])
def test_flags_that_make_no_sense_are_refused(run, flags, messages):
    with pytest.raises(UsageError) as error:
        begin(run, **flags)
    assert all(flag in str(error.value) for flag in flags)
    messages(error.value)


def test_a_fresh_start_keeps_nothing_of_the_old_run_but_logs(run):
    train(run)
    finish(run)
    run.logs.mkdir()
    (run.logs / "1").write_text("old")
    run.remove_results_and_write_start(recipe("seed=7"), {}, {})
    kept = ["job.json", "logs/1", "recipe.yaml", "versions.json"]
    assert sorted(everything(run.root)) == kept


def test_a_fresh_start_works_through_links_and_removes_nothing_of_others(run, tmp_path):
    disk = tmp_path / "disk"
    for name in ("checkpoints", "tensorboard"):
        (disk / name).mkdir(parents=True)
    run.root.mkdir()
    run.checkpoints.symlink_to(disk / "checkpoints")
    run.tensorboard.symlink_to(disk / "tensorboard")
    assert not begin(run), "folders that wait on a larger disk are no run"
    run.remove_results_and_write_start(recipe(), {}, {})
    (run.checkpoints / "step-00000001").mkdir()
    for path in ("checkpoints/important.bin", "tensorboard/mine", "tensorboard/events.out.tfevents.1"):
        (run.root / path).write_text("three weeks")
    assert not begin(run, fresh=True)
    run.remove_results_and_write_start(recipe("seed=7"), {}, {})
    assert run.checkpoints.is_symlink() and run.tensorboard.is_symlink()
    assert sorted(everything(disk)) == ["checkpoints/important.bin", "tensorboard/mine"]


FOREIGN = (
    "checkpoints/important.bin",
    "tensorboard/x",
    "metrics.jsonl",
    "job.json",
    "result.json",
    "recipe.yaml",
    "hf/model.safetensors",
)


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("flags", [{}, {"fresh": True}, {"resume": True}])
def test_a_directory_of_somebody_else_is_refused(run, name, flags):
    (run.root / name).parent.mkdir(parents=True, exist_ok=True)
    (run.root / name).write_text("three weeks")
    before = everything(run.root)
    with pytest.raises(UsageError, match=f"{name.split('/')[0]}.*recipe.yaml"):
        begin(run, **flags)
    assert everything(run.root) == before


def test_a_run_that_lost_its_recipe_is_not_begun_anew(run, messages):
    train(run)
    run.recipe.unlink()
    rest = sorted(path.name for path in run.root.iterdir())
    with pytest.raises(UsageError, match=", ".join(rest)) as error:
        begin(run)
    messages(error.value)


def test_the_users_own_recipe_is_not_taken_for_a_runs(run, messages):
    run.root.mkdir()
    run.recipe.write_text("# mine\n" + to_yaml(recipe().dump()))
    with pytest.raises(UsageError, match=r"recipe\.yaml") as error:
        begin(run)
    messages(error.value)


def test_where_nothing_was_trained_the_corrected_recipe_just_works(run):
    run.remove_results_and_write_start(recipe(), {}, {})
    (run.checkpoints / ".writing-00000005").mkdir(parents=True)
    run.metrics.write_text('{"step": 0, "data/skipped": 3}\n')
    corrected = "data.on_error=skip"
    assert not begin(run, corrected)
    run.remove_results_and_write_start(recipe(corrected), {}, {})
    assert "on_error: skip" in run.recipe.read_text()
    assert not list(run.checkpoints.iterdir())


@pytest.mark.parametrize("kept", ["step-00000001", "metrics.jsonl", "result.json"])
def test_where_something_was_trained_it_does_not(run, kept):
    run.remove_results_and_write_start(recipe(), {}, {})
    if kept.startswith("step"):
        (run.checkpoints / kept).mkdir(parents=True)
    else:
        (run.root / kept).write_text('{"step": 3}\n')
    with pytest.raises(UsageError) as error:
        begin(run, "data.on_error=skip")
    assert [line.partition(":")[0] for line in error.value.violations] == ["data.on_error"]


def test_samples_are_another_word_for_steps(run):
    begin(run)
    train(run)
    same, longer = (("train.steps=null", f"train.samples={samples}") for samples in (4800, 6400))
    assert begin(run, *same)
    with pytest.raises(UsageError, match=r"train\.steps: 300 -> 400"):
        begin(run, *longer)
    finish(run)
    assert run.has_required_results(recipe(*same)) and not run.has_required_results(recipe(*longer))
    assert begin(run, *longer, resume=True)


def test_a_run_of_epochs_is_made_longer_by_more_of_them(run):
    of = {epochs: ("train.steps=null", f"train.epochs={epochs}") for epochs in (1, 1.5)}
    run.remove_results_and_write_start(recipe(*of[1]), {}, {})
    run.metrics.write_text('{"step": 1}\n')
    finish(run)
    assert run.has_required_results(recipe(*of[1])) and not run.has_required_results(recipe(*of[1.5]))
    with pytest.raises(UsageError, match=r"train\.epochs: 1\.0 -> 1\.5"):
        begin(run, *of[1.5])
    assert begin(run, *of[1.5], resume=True)
    with pytest.raises(UsageError) as error:  # the steps of one epoch are not known
        begin(run, "train.steps=10000", resume=True)
    assert any("10000" in line for line in error.value.violations)


def test_a_finished_run_is_made_longer_by_resume_only(run, messages):
    train(run)
    finish(run)
    longer, shorter = "train.steps=400", "train.steps=200"
    assert run.has_required_results(recipe()) and not run.has_required_results(recipe(longer))
    with pytest.raises(UsageError, match=r"train\.steps: 300 -> 400") as error:
        begin(run, longer)
    assert "--resume" in str(error.value)
    messages(error.value)
    for overrides, change in (((shorter,), "train.steps: 300 -> 200"), ((longer, "seed=7"), "seed:")):
        with pytest.raises(UsageError, match=change) as error:
            begin(run, *overrides, resume=True)
        messages(error.value)
    assert begin(run, longer, resume=True)
    assert run.result.exists(), "looking changes nothing"
    run.write_resume(recipe(longer), {}, {})
    assert not run.result.exists()
    assert begin(run, longer, resume=True)
    with pytest.raises(UsageError, match=r"train.steps: 400 -> 300"):
        begin(run)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": null}', '{"step": 300}'])
def test_a_result_that_says_nothing_else_finishes_a_run(run, text):
    run.remove_results_and_write_start(recipe(), {}, {})
    run.result.write_text(text)
    assert run.has_required_results(recipe())


def test_a_run_that_an_early_stop_has_ended_goes_on_under_another_or_none(run, messages):
    train(run)
    rule = {"patience": 2, "min_delta": 0.1}
    run.result.write_text(json.dumps({"step": 100, "early_stop": rule}))
    same = "train.early_stop={patience: 2, min_delta: 0.1}"
    assert run.has_required_results(recipe(same)) and run.has_required_results(
        recipe(same, "train.steps=400")
    )
    for other in ("train.early_stop={patience: 3, min_delta: 0.1}", "train.early_stop=null"):
        assert not run.has_required_results(recipe(other)) and begin(run, other, resume=True)
    with pytest.raises(UsageError, match="early_stop") as error:
        begin(run, same)
    messages(error.value)


def test_a_run_keeps_what_it_began_with(run, tmp_path, messages, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run.remove_results_and_write_start(recipe(), {}, {}, Origin.from_start(Start(origin=Path("first"))))
    run.metrics.write_text('{"step": 1}\n')
    assert run.read_origin() == Origin(tmp_path / "first")
    assert begin(run), "a scheduler may leave it out"
    assert begin(run, origin=Path("first"))
    assert begin(run, origin=tmp_path / "first", resume=True)
    with pytest.raises(UsageError, match=f"{tmp_path}/first, .*{tmp_path}/second\\. ") as error:
        begin(run, origin=Path("second"))
    messages(error.value)
    with pytest.raises(UsageError, match=f"{tmp_path}/first, .*{tmp_path}/first\\. ") as error:
        begin(run, origin=Path("first"), weights_only=True)
    messages(error.value)
    assert not begin(run, origin=Path("second"), fresh=True)
    run.remove_results_and_write_start(recipe(), {}, {})
    run.metrics.write_text('{"step": 1}\n')
    assert run.read_origin() is None
    with pytest.raises(UsageError, match=f"{tmp_path}/first") as error:
        begin(run, origin=Path("first"))
    messages(error.value)


def test_a_run_keeps_that_it_began_with_weights_alone(run, tmp_path, messages):
    start = Start(origin=tmp_path / "first", weights_only=True)
    run.remove_results_and_write_start(recipe(), {}, {}, Origin.from_start(start))
    run.metrics.write_text('{"step": 1}\n')
    assert run.read_origin() == Origin(tmp_path / "first", weights_only=True)
    assert begin(run) and run.decide_resume(recipe(), start)
    with pytest.raises(UsageError, match=f"{tmp_path}/first, .*{tmp_path}/first\\. ") as error:
        begin(run, origin=tmp_path / "first")
    messages(error.value)


def test_weights_alone_are_those_of_a_checkpoint(messages):
    with pytest.raises(UsageError, match="--from") as error:
        Start(weights_only=True)
    messages(error.value)


@pytest.mark.parametrize("name", ["", "checkpoints", "checkpoints/step-00000001"])
def test_a_fresh_start_does_not_remove_what_it_begins_with(run, name, messages):
    train(run)
    with pytest.raises(UsageError, match="--fresh") as error:
        begin(run, fresh=True, origin=run.root / name)
    messages(error.value)


def test_a_start_that_was_interrupted_is_no_run(run, monkeypatch):
    run.remove_results_and_write_start(recipe(), {}, {})
    with pytest.raises(TypeError):
        run.remove_results_and_write_start(recipe(), {"plan": object()}, {})
    assert not run.decide_resume(recipe("seed=7"), Start())


def test_metrics_after_the_resumed_step_are_taken_out(run):
    run.root.mkdir()
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (10, 20, 30)]
    run.metrics.write_text("\n".join([*lines, '{"step": 3']))
    run.rewind_metrics(20)
    assert run.metrics.read_text().splitlines() == lines[:2]


def test_lines_that_others_wrote_do_not_stop_a_resume(run):
    run.root.mkdir()
    foreign = ['{"step":"x"}', '{"note": 1}', "[3]", '"words"', "null", '{"step": null}', '{"step": 2.5}']
    run.metrics.write_text(
        "".join(f"{line}\n" for line in [*foreign, '{"step": 20.5}', '{"step": 30}']) + "half\n"
    )
    run.rewind_metrics(20)
    assert run.metrics.read_text().splitlines() == foreign


HOLD = """
import sys
from pathlib import Path
from bundle.runs.directory import RunDirectory
with RunDirectory(Path(sys.argv[1])).hold_lock(", port 7", joins_launcher=sys.argv[2] == "rank"):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(run: RunDirectory, role: str) -> Iterator[subprocess.Popen]:
    """A process that holds the lock of a run."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", HOLD, str(run.root), role]
    process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    try:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "_LOCK_SECONDS", 0.0)


def test_a_file_system_without_locks_is_one_clear_error(run, messages, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UsageError, match=os.strerror(errno.ENOSYS)) as error, run.hold_lock():
        pass
    messages(error.value)


def test_the_lock_is_not_written_through_a_symbolic_link(run, messages, tmp_path):
    target = tmp_path / "other"
    target.write_text("of somebody else")
    run.root.mkdir(parents=True, exist_ok=True)
    (run.root / ".lock").symlink_to(target)
    with pytest.raises(UsageError, match="symbolic link") as error, run.hold_lock():
        pass
    messages(error.value)
    assert target.read_text() == "of somebody else"


@pytest.mark.usefixtures("impatient")
def test_two_runs_cannot_use_one_directory_and_a_killed_one_lets_go(run):
    with holder(run, "launcher") as launcher:
        for _ in range(2):  # a refusal leaves the holder's name
            with pytest.raises(DirectoryInUse) as error, run.hold_lock():
                pass
            assert error.value.holder == f"process {launcher.pid} on {socket.gethostname()}, port 7"
    with run.hold_lock():
        pass


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_outlives_its_launcher_keeps_the_lock(run):
    with holder(run, "launcher") as launcher, holder(run, "rank"):
        launcher.kill()
        launcher.wait()
        with pytest.raises(DirectoryInUse, match=f"process {launcher.pid} on "), run.hold_lock():
            pass
    with run.hold_lock():
        pass


def test_a_launch_waits_for_the_processes_of_the_last_one_to_end(run):
    with holder(run, "rank") as rank:
        threading.Timer(0.5, rank.kill).start()
        with run.hold_lock():
            assert rank.wait(5) == -signal.SIGKILL


FORK = """
import os, sys, time
from pathlib import Path
from bundle.runs.directory import RunDirectory
with RunDirectory(Path(sys.argv[1])).hold_lock():
    child = os.fork()
    os.write(1, f"{child or 'begun'}\\n".encode())  # in one piece
    time.sleep(600)
"""


@pytest.mark.usefixtures("impatient")
def test_what_the_holder_forked_does_not_hold_it_any_longer(run):
    command = [sys.executable, "-c", FORK, str(run.root)]
    holder = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout
    child = int(min(holder.stdout.readline() for _ in range(2)))  # both have gone through the fork
    try:
        with pytest.raises(UsageError, match=f"process {holder.pid} on "), run.hold_lock():
            pass  # although its child has let go
        holder.kill()
        holder.wait()
        with run.hold_lock():
            os.kill(child, 0)  # it lives
    finally:
        holder.kill()
        os.kill(child, signal.SIGKILL)
        holder.communicate()


@pytest.fixture
def train_beside(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Return what `train` prints in a run directory that another run uses; it starts no rank."""
    monkeypatch.setattr(directory, "_LOCK_SECONDS", 0.0)
    monkeypatch.chdir(run.root.parent)
    umask = os.umask(0o022)

    def start(*words: str) -> str:
        code, printed = capture_bundle("train", "demo", "--backend=cpu", "--run-directory=demo", *words)
        assert code == 2 and "demo: another run is using it" in printed, printed
        assert not list(run.root.glob("logs/node-*"))
        return printed

    yield start
    os.umask(umask)


def test_a_second_launch_is_refused_before_preflight_and_ranks(run, train_beside):
    with holder(run, "launcher") as launcher:
        printed = train_beside("--preflight", "--devices-per-node=2")
    assert f"(process {launcher.pid} on " in printed
    assert not (run.root / "logs").exists()


@pytest.mark.parametrize(("port", "is_told"), [(8, True), (7, False)])
def test_nodes_that_wait_for_a_refused_one_are_told_unless_they_meet_the_holder(
    run, train_beside, port, is_told
):
    report = run.root / "logs" / "failed-start.json"
    report.parent.mkdir(parents=True)
    with holder(run, "launcher"):
        rendezvous = f"--rendezvous=127.0.0.1:{port}"
        train_beside("--devices-per-node=1", "--nodes=2", "--node-rank=0", rendezvous)
    assert report.exists() == is_told
    values = json.loads(report.read_text()) if is_told else {}
    refusal = {"port": 8, "code": 2, "kind": "refused", "action": "none", "nodes": 2}
    assert {key: values.get(key) for key in refusal} == refusal or not is_told


def test_an_export_is_asked_of_a_finished_run_and_removed_by_a_fresh_one(run):
    train(run)
    finish(run)
    assert begin(run, "checkpoint.export=hf")
    exported = [
        run.build_export_path("hf"),
        run.build_export_path("hf", 20),
        run.build_export_path("peft", 123456789),
    ]
    assert [path.name for path in exported] == ["hf", "hf-00000020", "peft-123456789"]
    big = run.root.parent / "big"
    (big / "hf").mkdir(parents=True)
    run.build_export_path("hf").symlink_to(big / "hf")
    for path in exported[1:]:
        path.mkdir()
    for path in exported:
        (path / "config.json").write_text("{}")
    (run.root / "hf-notes").mkdir()
    with pytest.raises(UsageError, match="--fresh"):
        begin(run, "checkpoint.export=hf")
    assert not begin(run, fresh=True)
    run.remove_results_and_write_start(recipe(), {}, {})
    assert not any(path.exists() for path in exported) and not list(big.iterdir())
    assert (run.root / "hf-notes").is_dir(), "which no run has made"


def test_exports_alone_are_no_run_of_ours(run, messages):
    run.build_export_path("hf", 20).mkdir(parents=True)
    (run.build_export_path("hf", 20) / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="hf-00000020") as error:
        begin(run)
    messages(error.value)


@pytest.mark.parametrize("flags", [{}, {"fresh": True}, {"resume": True}])
def test_a_run_does_not_begin_with_what_it_would_replace(run, flags, messages):
    train(run)
    run.build_export_path("hf").mkdir()
    (run.build_export_path("hf") / "config.json").write_text(json.dumps(recipe().model.config))
    shutil.copytree(run.build_export_path("hf"), run.build_export_path("hf", 20))
    for own in (run.build_export_path("hf"), run.build_export_path("hf", 20)):
        with pytest.raises(UsageError, match=str(own)) as error:
            begin(run, f"model.path={own}", **flags)
        messages(error.value)
