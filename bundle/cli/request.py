"""The way from a request to a plan and a job: the options that verbs have in common, and `plan_job`."""

import functools
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args, get_origin

from bundle.cli import options
from bundle.environment import image
from bundle.environment.image import BuildInfo
from bundle.launch import Start
from bundle.planning import Plan, Problem, build_plan
from bundle.recipe import Recipe, load

if TYPE_CHECKING:
    from bundle.launch.job import Job

CURRENT_ENVIRONMENT_RECORD: Final = "local"
# The record of the job's image. None: it is not one of our images; undecided: its content is unknown;
# local: the job runs in the environment of this process.
ImageContents = BuildInfo | Literal["undecided", "local"] | None


@dataclass(frozen=True)
class JobRequest:
    """A request for a job: the changes to its recipe, its start, and the software that it uses."""

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
        """Return the recipe of that name or file, with the user's changes to its keys."""
        replayed = [] if self.rollouts is None else [f"rl.rollout.path={json.dumps(str(self.rollouts))}"]
        return load(recipe, [*(self.overrides or ()), *replayed])

    def find_run_directory(self, recipe: Recipe) -> Path:
        """Return the run directory."""
        return self.run_directory or recipe.default_run_directory

    def build_start(self, *, fresh: bool = False) -> Start:
        """Return the start of the run."""
        return Start(fresh=fresh, resume=self.resume, origin=self.start_from, weights_only=self.weights_only)


@dataclass(frozen=True)
class Machines:
    """The machines of a job, where they are not this machine."""

    nodes: options.Nodes = None
    hardware: options.Hardware = ""


_LOCAL_MACHINE = Machines()


@dataclass(frozen=True)
class PlannedJob:
    """A request with its plan, which may have problems."""

    plan: Plan
    request: JobRequest
    fresh: bool
    record: ImageContents

    def to_job(self) -> "Job":
        """Return the job. Raise what a plan with problems raises."""
        from bundle.launch.job import from_plan  # a printed plan does not need it

        self.plan.raise_gravest_problem()
        return from_plan(
            self.plan,
            self.request.find_run_directory(self.plan.recipe),
            start=self.request.build_start(fresh=self.fresh),
            record=image.read_own_record() if self.record == CURRENT_ENVIRONMENT_RECORD else self.record,
        )


def plan_job(
    recipe: Recipe,
    request: JobRequest,
    machines: Machines = _LOCAL_MACHINE,
    record: ImageContents = CURRENT_ENVIRONMENT_RECORD,
    *,
    fresh: bool = False,
    problems: Sequence[Problem] = (),
    weights: str = "",
) -> PlannedJob:
    """Return the plan of a recipe on these machines.

    `problems` and `weights` come from a caller that has read the recipe's files. The packages of a `record`
    replace those that are installed here.
    """
    image_record = record if isinstance(record, BuildInfo) else None
    plan = build_plan(
        recipe,
        backend=request.backend or None,
        hardware_name=machines.hardware or None,
        mcore=request.mcore or (image_record.megatron_version if image_record else ""),
        allow_drift=request.allow_drift or (),
        nodes=machines.nodes,
        per_node=request.devices_per_node,
        other_packages=image_record,
        extra_problems=problems,
        weights=weights,
    )
    return PlannedJob(plan, request, fresh, record)


def _list_options(group: Any) -> list[inspect.Parameter]:
    """Return a parameter for each annotated field of a dataclass. typer takes a list in place of a tuple."""
    parameters = []
    for parameter in inspect.signature(group).parameters.values():
        if get_origin(parameter.annotation) is Annotated:
            value_type, option = get_args(parameter.annotation)
            if get_origin(value_type) is tuple:
                value_type = GenericAlias(list, get_args(value_type)[0])
            parameters.append(parameter.replace(annotation=Annotated[value_type, option]))
    return parameters


def expand_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Return the verb for typer, with an option for each annotated field of a dataclass parameter."""
    signature = inspect.signature(verb)
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if is_dataclass(parameter.annotation)
    }
    group_options = {name: _list_options(group) for name, group in groups.items()}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        parameters += group_options.get(name, [parameter])
    tuple_names = [parameter.name for parameter in parameters if isinstance(parameter.default, tuple)]

    @functools.wraps(verb)
    def call_verb(**values: Any) -> None:
        values |= {name: tuple(values[name]) for name in tuple_names}
        for name, group in groups.items():
            values[name] = group(**{option.name: values.pop(option.name) for option in group_options[name]})
        verb(**values)

    keyword_parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    call_verb.__signature__ = signature.replace(parameters=keyword_parameters)  # type: ignore[attr-defined]
    call_verb.__annotations__ = {parameter.name: parameter.annotation for parameter in keyword_parameters}
    return call_verb
