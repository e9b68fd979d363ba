"""Proves each patch on this machine: what goes wrong without it, and that it does not with it."""

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from pathlib import Path

from bundle.environment import packages
from bundle.errors import EnvironmentUnfit
from bundle.patches import Patch, plan
from bundle.patches.catalogue import PATCHES
from bundle.patches.plan import Survey, survey
from bundle.patches.subject import installed, load, named
from bundle.verification.check import CHECKS, Check, Gap, Observation, Raises, Result, Status, judge
from bundle.verification.observing import Order, observed

__all__ = ["CHECKS", "Check", "Gap", "Observation", "Raises", "Result", "Status", "verify"]


def verify(
    backend: str, ids: Collection[str] = (), *, tree: Path | None = None, devices: int | None = None
) -> Iterator[Result]:
    """Whether patches are proven on this machine, each as soon as it is known: those named, or all needed.

    `tree`: the directory that holds `megatron`; None for the one that is importable. `devices`: how many
    ranks there may be; None for any number. Raises UsageError for unknown ids, EnvironmentUnfit where there
    is no megatron.
    """
    decisions = {decision.id: decision for decision in decide(backend, tree, ids).decisions}
    found = decide(backend, tree)
    if found.subject.root is None:
        raise EnvironmentUnfit(
            "There is no megatron-core on the Python path whose patches could be proven. Install one, or put "
            "a checkout on PYTHONPATH"
        )
    standing = needed(found)
    asked = [patch for patch in PATCHES if patch.id in ids] if ids else standing
    impossible = {
        patch.id: f"this megatron is not patched: {decisions[patch.id].reason}"
        for patch in asked
        if patch not in standing
    } | {
        patch.id: f"takes {CHECKS[patch.id].world} devices, and this machine has {devices}"
        for patch in asked
        if devices is not None and CHECKS[patch.id].world > devices
    }
    unproven = (Result(patch, Status.NOT_PROVABLE, why) for patch, why in impossible.items())
    return chain(unproven, _proven([patch for patch in asked if patch.id not in impossible], found, backend))


def decide(backend: str, tree: Path | None = None, requested: Collection[str] | None = None) -> Survey:
    """Every decision about a megatron on a backend, whatever the job; opt-in patches count as requested."""
    here, table = packages.detect(), load()
    subject = installed(here, table) if tree is None else named(str(tree), table)
    wanted = [patch.id for patch in PATCHES if patch.opt_in] if requested is None else requested
    return survey(subject, table, here, backend=backend, requested=wanted)


def needed(found: Survey) -> list[Patch]:
    """The patches to apply."""
    chosen = {decision.id for decision in found.applied}
    return [patch for patch in PATCHES if patch.id in chosen]


def everything(found: Survey) -> plan.PatchPlan:
    """The plan that applies all of them, of which each run takes its part, whatever else was decided."""
    return plan.make(found._replace(decisions=found.applied))


def _proven(patches: Sequence[Patch], found: Survey, backend: str) -> Iterator[Result]:
    standing = needed(found)
    # Checks of several ranks come first, while no process is ahead of another one.
    checked = sorted(((p, CHECKS[p.id]) for p in patches), key=lambda pair: -pair[1].world)
    orders: list[Order] = []
    for patch, check in checked:
        base = _base(patch, check, standing, backend)
        for applied in (base, (*base, patch.id)):
            orders.append(Order(len(orders), check.measurement, check.world, check.seconds, applied))
    seen: dict[int, list[Observation]] = {}
    for order, answers in observed(orders, everything(found), backend=backend, root=found.subject.root):
        seen[order.number] = answers
        index = order.number // 2
        if {2 * index, 2 * index + 1} <= seen.keys():
            patch, check = checked[index]
            yield judge(patch.id, check, seen[2 * index], seen[2 * index + 1])


def _base(patch: Patch, check: Check, standing: Sequence[Patch], backend: str) -> tuple[str, ...]:
    """What stands in both runs: what this backend cannot do without, and what the check needs."""
    return tuple(
        p.id for p in standing if p.id != patch.id and (p.backends == (backend,) or p.id in check.needs)
    )
