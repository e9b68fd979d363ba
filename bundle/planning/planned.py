"""The plan of a recipe on this machine, or on a named one, with the survey that its patches come from."""

from collections.abc import Sequence

from bundle import capabilities, stack
from bundle.errors import BundleError, EnvironmentUnfit, ExitCode, PatchError, UsageError
from bundle.frozen import frozen
from bundle.hardware import Hardware
from bundle.patches import subject, survey, table
from bundle.patches.subject import DEFAULT, Subject
from bundle.patches.survey import Survey
from bundle.patches.table import Table
from bundle.planning.machine import machine
from bundle.planning.plan import Plan, Target, make
from bundle.planning.problem import Problem, hardware_problem
from bundle.recipe import Recipe
from bundle.stack import versions

_ERRORS: dict[ExitCode, type[BundleError]] = {
    ExitCode.USAGE: UsageError,
    ExitCode.ENVIRONMENT_UNFIT: EnvironmentUnfit,
    ExitCode.PATCHES: PatchError,
}


@frozen
class Planned:
    """A plan, and the survey of megatron-core that it was made with."""

    plan: Plan
    survey: Survey

    def refuse(self) -> None:
        """Raises the gravest problem's error with all problems in it; does nothing when there is none."""
        if self.plan.code is not ExitCode.OK:
            reasons = [problem.text for problem in self.plan.problems]
            raise _ERRORS[self.plan.code](f"recipe {self.plan.recipe.name} cannot run here", reasons)


def planned(
    recipe: Recipe,
    *,
    backend: str | None = None,
    named: str | None = None,
    mcore: str = "",
    allow_drift: Sequence[str] = (),
    nodes: int | None = None,
    per_node: int | None = None,
    beside: Sequence[Problem] = (),
) -> Planned:
    """The plan of a recipe; what is None comes from the recipe and from this machine.

    `named` is a machine to plan for instead of this one, `mcore` a version or a tree instead of what is
    installed, `beside` problems that were found elsewhere. Raises UsageError and EnvironmentUnfit where there
    is nothing to plan with.
    """
    on, notes = machine(recipe.backend, backend, named)
    can = capabilities.of(on.backend)
    kernel = can.attention(recipe, on.generation.value).value
    features = recipe.features - {"attention-auto"} | {f"attention-{kernel}"}
    target, decided = _megatron(features, on, mcore, allow_drift)
    plan = make(
        recipe,
        on,
        can,
        target,
        decided.decisions,
        nodes=nodes,
        per_node=per_node,
        notes=notes,
        root=decided.subject.root,
        beside=[*beside, *([hardware_problem(can.refusal)] if can.refusal else [])],
    )
    return Planned(plan, decided)


def _megatron(
    features: frozenset[str], on: Hardware, mcore: str, allowed: Sequence[str]
) -> tuple[Target, Survey]:
    """The megatron-core that is named, installed or else the default, and the decisions about it."""
    here, reviewed = stack.detect(), table.load()
    if mcore:
        of, origin = subject.named(mcore, reviewed), "--mcore"
        _check_minor(of, reviewed)
    else:
        of = subject.installed(here, reviewed)
        origin = f"{of.root}, {of.origin}" if of.root else of.origin
    decided = survey.survey(of, reviewed, here, backend=on.backend, features=features, allowed=allowed)
    known = of.version is not None and stack.base(of.version) is not None
    unread = "" if known else f"; its version cannot be read, taken for {DEFAULT}"
    return Target(of.version if known and of.version else DEFAULT, origin + unread), decided


def _check_minor(of: Subject, reviewed: Table) -> None:
    """Raises UsageError for a mere version of a minor that nobody has reviewed: there may be none such."""
    known = [minor for reference in reviewed.references if (minor := versions.minor(reference))]
    if of.root is None and of.version is not None and versions.minor(of.version) not in known:
        first, last = (".".join(map(str, minor)) for minor in (known[0], known[-1]))
        raise UsageError(
            f"--mcore {of.version}: no megatron-core of that number is known, only {first} to {last}; for "
            "another one give the directory of its source"
        )
