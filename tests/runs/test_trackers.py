"""Numbers of a run in Weights & Biases and MLflow, read back; nothing leaves the machine."""

import json
import math
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bundle.errors import EnvironmentUnfit
from bundle.recipe import load
from bundle.runs.directory import RunDirectory
from bundle.runs.metrics import start_trackers

WANDB = "metrics.wandb={project: tests, mode: offline}"
MLFLOW = "metrics.mlflow={experiment: tests}"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    for variable in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "seven").mkdir()
    return RunDirectory(tmp_path / "seven")


def logged(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log behind 7 bytes: blocks of 32 KiB, records in one or more parts."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if (left := -at % 2**15) and left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):  # still being written
            return
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or a last part
            yield whole
            whole = b""


def whole(path: Path) -> list[Any]:
    """The records of an offline file: wandb's service writes the last ones after its client is done."""
    from wandb.proto import wandb_internal_pb2

    for _ in range(300):
        records = [wandb_internal_pb2.Record.FromString(data) for data in logged(path.read_bytes())]
        if any(record.HasField("exit") for record in records):
            return records
        time.sleep(0.1)
    raise AssertionError(f"{path} has no end")


def wandb_runs(directory: RunDirectory) -> dict[str, dict[int, dict[str, float]]]:
    """run -> step -> numbers, from the offline files."""
    found: dict[str, dict[int, dict[str, float]]] = defaultdict(dict)
    for path in sorted((directory.root / "wandb").glob("offline-run-*/run-*.wandb")):
        for record in whole(path):
            items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            if "step" in items:
                found[path.stem.removeprefix("run-")][items["step"]] = items
    return found


def report(directory: RunDirectory, override: str, *numbers: tuple[int, dict[str, float]]) -> None:
    (sink,) = start_trackers(load("demo", [override]), directory)
    for step, values in numbers:
        sink.write(step, values)
    sink.close()


@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_gets_every_number_and_a_resumed_run_goes_on_in_its_own(directory):
    pytest.importorskip("wandb")
    report(directory, WANDB, (1, {"train/loss": 2.5, "train/grad_norm": 7.0}), (2, {"train/loss": 2.25}))
    report(directory, WANDB, (2, {"train/loss": 2.125}), (3, {"validation/loss": math.nan}))
    ((run, steps),) = wandb_runs(directory).items()
    assert run == json.loads(directory.trackers.read_text())["wandb"]
    assert steps[1]["train/loss"] == 2.5 and steps[1]["train/grad_norm"] == 7.0
    assert steps[2]["train/loss"] == 2.125 and set(steps) == {1, 2, 3}


@pytest.mark.filterwarnings("ignore")
def test_mlflow_gets_every_number_the_recipe_and_a_resumed_run_goes_on_in_its_own(directory):
    mlflow = pytest.importorskip("mlflow")
    numbers = {"train/loss": 2.5, "train/tokens": 4096, "train/grad_norm": math.inf}
    report(directory, MLFLOW, (1, numbers), (2, {"train/loss": 2.25}))
    report(directory, MLFLOW, (3, {"train/loss": 2.0}))
    client = mlflow.MlflowClient(f"sqlite:///{directory.root}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert run.info.run_id == json.loads(directory.trackers.read_text())["mlflow"]
    assert (run.info.run_name, run.info.status) == ("seven", "FINISHED")
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in losses] == [(1, 2.5), (2, 2.25), (3, 2.0)]
    assert run.data.metrics["train/tokens"] == 4096 and "train/grad_norm" not in run.data.metrics
    params, config = run.data.params, load("demo").model.config
    assert {name: json.loads(params[f"model.config.{name}"]) for name in config} == config


def test_a_recipe_without_trackers_has_none_and_writes_nothing(directory):
    assert start_trackers(load("demo"), directory) == [] and not directory.trackers.exists()


@pytest.mark.parametrize(("name", "override"), [("wandb", WANDB), ("mlflow", MLFLOW)])
def test_one_that_is_not_installed_is_named_with_its_remedy(directory, monkeypatch, name, override, messages):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EnvironmentUnfit, match=rf"metrics\.{name}: .*\[{name}\]") as error:
        start_trackers(load("demo", [override]), directory)
    assert not directory.trackers.exists()
    messages(error.value)


def test_one_that_cannot_be_begun_is_named_with_its_reason(directory):
    pytest.importorskip("mlflow")
    override = "metrics.mlflow={experiment: tests, tracking_uri: 'nowhere://x'}"
    with pytest.raises(EnvironmentUnfit, match="nowhere") as error:
        start_trackers(load("demo", [override]), directory)
    assert str(error.value).startswith("metrics.mlflow: ")


def test_one_that_fails_later_is_told_once_and_ends_nothing(directory, monkeypatch, capsys, messages):
    from bundle.runs import metrics as module

    asked: list[int] = []

    class Fails:
        run = "x"

        def __init__(self, *_: Any) -> None: ...

        def write(self, step: int, values: Any) -> None:
            asked.append(step)
            if step == 2:
                raise OSError("the network is gone")

        def close(self) -> None:
            asked.append(0)

    monkeypatch.setattr(module, "MLflowSink", Fails)
    report(directory, MLFLOW, (1, {}), (2, {}), (3, {}))
    assert asked == [1, 2]
    told = capsys.readouterr().err
    assert told.startswith("metrics.mlflow: ") and told.count("\n") == 1
    messages(told)
