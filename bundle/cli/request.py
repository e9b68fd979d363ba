"""What a job is asked for with: the options that the verbs which plan one have in common, in one list."""

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bundle.cli import options
from bundle.launch import Start
from bundle.recipe import Recipe, load


@dataclass(frozen=True)
class JobRequest:
    """A job as it is asked for: what is changed of its recipe, how it begins, and what it runs with."""

    overrides: options.Overrides = None
    run_directory: options.RunDirectory = None
    resume: options.Resume = False
    start_from: options.StartFrom = None
    weights_only: options.WeightsOnly = False
    rollouts: options.Rollouts = None
    backend: options.Backend = ""
    mcore: options.Mcore = ""
    allow_drift: options.AllowDrift = None
    devices_per_node: options.DevicesPerNode = None
    log_level: options.LogLevel = ""

    def load_recipe(self, recipe: str) -> Recipe:
        """The recipe of that name or file, with what is said of its keys."""
        replayed = [] if self.rollouts is None else [f"rl.rollout.path={json.dumps(str(self.rollouts))}"]
        return load(recipe, [*(self.overrides or ()), *replayed])

    def find_run_directory(self, recipe: Recipe) -> Path:
        """Where the run lives."""
        return self.run_directory or recipe.run_directory

    def build_start(self, *, fresh: bool = False) -> Start:
        """What the run begins with."""
        return Start(fresh=fresh, resume=self.resume, origin=self.start_from, weights_only=self.weights_only)


@dataclass(frozen=True)
class Machines:
    """What a job will run on, where that is not this machine."""

    nodes: options.Nodes = None
    hardware: options.Hardware = ""


def expand_options(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb for typer: a parameter that is one of the above becomes an option for each of its fields."""
    signature = inspect.signature(verb)
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if parameter.annotation in (JobRequest, Machines)
    }
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        group = groups.get(name)
        parameters += inspect.signature(group).parameters.values() if group else [parameter]

    @functools.wraps(verb)
    def call_verb(**values: Any) -> None:
        option_groups = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        verb(**values, **option_groups)

    keyword_parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    call_verb.__signature__ = signature.replace(parameters=keyword_parameters)  # type: ignore[attr-defined]
    call_verb.__annotations__ = {parameter.name: parameter.annotation for parameter in keyword_parameters}
    return call_verb
