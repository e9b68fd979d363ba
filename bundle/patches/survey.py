"""Everything that is decided about one megatron-core for one job."""

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from bundle.environment.packages import Packages
from bundle.errors import PatchError, UsageError, did_you_mean, nearest
from bundle.patches import deciding
from bundle.patches.catalogue import PATCHES, TRAPS
from bundle.patches.deciding import PatchContext
from bundle.patches.entry import Action, Decision
from bundle.patches.seams import SEAMS
from bundle.patches.subject import Subject
from bundle.patches.table import Table


class Survey(NamedTuple):
    """The decisions, the megatron-core that they are about, and the modules that were read for them."""

    subject: Subject
    decisions: tuple[Decision, ...]
    read: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises UsageError for a recipe that meets traps, PatchError for a patch that cannot be applied."""
        stopping = [decision for decision in self.decisions if decision.stops]
        if traps := [decision.problem for decision in stopping if decision.action is Action.TRAP]:
            raise UsageError("This recipe meets known defects of this megatron-core:", traps)
        if stopping:
            problems = [decision.problem for decision in stopping]
            raise PatchError("The job needs patches that cannot be applied:", problems)

    @property
    def applied(self) -> tuple[Decision, ...]:
        """The patches to apply."""
        return tuple(decision for decision in self.decisions if decision.action is Action.APPLY)


def survey(
    of: Subject,
    table: Table,
    stack: Packages,
    *,
    backend: str | None = None,
    features: frozenset[str] | None = None,
    requested: Collection[str] = (),
    allowed: Collection[str] = (),
    vouched: Collection[str] | None = None,
) -> Survey:
    """The decision about every patch, trap and changed seam. Raises UsageError for unknown ids."""
    known = {patch.id: patch for patch in PATCHES}
    _check_ids({*requested, *allowed, *(vouched or ())}, known)
    job = replace(
        context(of, stack, backend=backend, features=features),
        requested=frozenset(requested),
        allowed=frozenset(allowed),
        vouched=None if vouched is None else frozenset(vouched),
    )
    reader = of.reader(table)
    decisions = [deciding.decide(patch, reader.read(patch), job) for patch in PATCHES]
    others = [deciding.decide_trap(trap, reader.read(trap), job) for trap in TRAPS]
    others += [deciding.decide_seam(seam, reader.look(seam), job) for seam in SEAMS]
    decisions += [decision for decision in others if decision is not None]
    return Survey(of, deciding.exclude(decisions, known), reader.read_so_far())


def context(
    of: Subject, stack: Packages, *, backend: str | None = None, features: frozenset[str] | None = None
) -> PatchContext:
    """What decisions about a megatron depend on, beside its own code."""
    return PatchContext(
        version=of.version,
        backend=backend,
        features=_assumed(features, backend),
        packages=_versions(stack, {name for patch in PATCHES for name, _ in patch.requires}),
        mindspeed=(mindspeed.commit,) if (mindspeed := stack.package("mindspeed")) else None,
        conflict=of.conflict,
    )


def _versions(stack: Packages, names: Collection[str]) -> dict[str, str]:
    """The versions of those of these packages that are installed."""
    found = {name: stack.package(name) for name in names}
    return {name: package.version for name, package in found.items() if package and package.version}


def _assumed(features: frozenset[str] | None, backend: str | None) -> frozenset[str] | None:
    """The features, with what `attention: auto` is taken for: an accelerator's kernels are flash kernels."""
    if features is None or "attention-auto" not in features or backend == "cpu":
        return features
    return features | {"attention-flash"}


def _check_ids(ids: Collection[str], known: Collection[str]) -> None:
    unknown = [f"{name}{did_you_mean(nearest(name, known))}" for name in sorted(ids) if name not in known]
    if unknown:
        raise UsageError("There are no patches with these ids; `patches list` names them all:", unknown)
