"""Experiment trackers that a recipe may name: Weights & Biases and MLflow (extras `wandb` and `mlflow`)."""

import json
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from bundle import files
from bundle.errors import EnvironmentUnfit
from bundle.recipe import Recipe, flat
from bundle.runs.directory import RunDirectory
from bundle.runs.metrics import Sink, finite


def trackers(recipe: Recipe, directory: RunDirectory) -> list[Sink]:
    """A sink for each tracker of the recipe; a run that goes on goes on in the tracker's run, too.

    Raises EnvironmentUnfit where a tracker is not installed or cannot be reached. One that fails later is
    told once and left out: it is no reason to end a training.
    """
    named: list[tuple[str, Callable[[Recipe, RunDirectory, str | None], Any]]] = []
    if recipe.metrics.wandb is not None:
        named.append(("wandb", WeightsAndBiases))
    if recipe.metrics.mlflow is not None:
        named.append(("mlflow", MLflow))
    runs: dict[str, str] = json.loads(files.read(directory.trackers) or "{}")
    made: list[Sink] = []
    for name, kind in named:
        try:
            sink = kind(recipe, directory, runs.get(name))
        except ModuleNotFoundError as error:
            raise EnvironmentUnfit(
                f"metrics.{name}: {error.name} is not installed: pip install 'mcore-bundle[{name}]', or leave"
                " it out of the recipe"
            ) from error
        except Exception as error:
            raise EnvironmentUnfit(
                f"metrics.{name}: cannot be begun: {type(error).__name__}: {error}"
            ) from error
        runs[name] = sink.run
        made.append(Tolerated(name, sink))
    if runs:
        files.write_json(directory.trackers, runs)
    return made


class WeightsAndBiases:
    """A run of Weights & Biases; with mode offline it lies in the run directory, for `wandb sync`."""

    def __init__(self, recipe: Recipe, directory: RunDirectory, run: str | None) -> None:
        import wandb

        asked = recipe.metrics.wandb
        assert asked is not None
        self.run = run or uuid.uuid4().hex[:8]
        self._run: Any = wandb.init(
            project=asked.project,
            entity=asked.entity,
            mode=asked.mode,
            id=self.run,
            resume="allow",
            name=directory.root.resolve().name,
            dir=directory.root,
            config=recipe.dump(),
            settings=wandb.Settings(console="off", silent=True),
        )
        # A resumed run reports steps again that an interrupted one had reported.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of an MLflow server, or of a database in the run directory."""

    def __init__(self, recipe: Recipe, directory: RunDirectory, run: str | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        asked = recipe.metrics.mlflow
        assert asked is not None
        self._metric: Any = Metric
        self._client: Any = MlflowClient(
            asked.tracking_uri or f"sqlite:///{(directory.root / 'mlflow.db').resolve()}"
        )
        if run is not None:
            self.run = run
            return
        found = self._client.get_experiment_by_name(asked.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(asked.experiment)
        made = self._client.create_run(experiment, run_name=directory.root.resolve().name)
        self.run = made.info.run_id
        parameters = [Param(key, json.dumps(value)[:500]) for key, value in flat(recipe.dump())]
        for at in range(0, len(parameters), 100):  # as many as a request may hold
            self._client.log_batch(self.run, params=parameters[at : at + 100])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        numbers = {name: value for name, value in finite(dict(values)).items() if value is not None}
        metrics = [self._metric(name, value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self.run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self.run)


class Tolerated:
    """A sink that may fail: it is told once, on standard error, and gets nothing more."""

    def __init__(self, name: str, sink: Sink) -> None:
        self._name, self._sink = name, sink
        self._works = True

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._try(lambda: self._sink.write(step, values))

    def close(self) -> None:
        self._try(self._sink.close)

    def _try(self, call: Callable[[], None]) -> None:
        if not self._works:
            return
        try:
            call()
        except Exception as error:  # noqa: BLE001  whatever a foreign service raises
            self._works = False
            why = f"{type(error).__name__}: {error}"
            print(f"metrics.{self._name}: gets nothing more in this run: {why}", file=sys.stderr, flush=True)
