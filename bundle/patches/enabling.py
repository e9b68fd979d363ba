"""The patches in a program that is not ours: decided for what it imports, applied, and told."""

import logging
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from bundle import log
from bundle.environment import hardware, packages
from bundle.environment.packages import Stack
from bundle.errors import EnvironmentUnfit, PatchError
from bundle.patches import applying, plan
from bundle.patches import features as words
from bundle.patches.entry import Action
from bundle.patches.plan import PatchPlan, Survey, survey
from bundle.patches.subject import installed
from bundle.patches.table import load

_log = logging.getLogger(__name__)


def enable(
    features: Iterable[str] | None = None,
    *,
    vouched: Collection[str] = (),
    allowed: Collection[str] = (),
    backend: str = "auto",
) -> PatchPlan:
    """Patches the megatron-core that this process imports, or has imported; the plan is logged, once.

    `features` are words of `features.WORDS` for what the program uses; without them everything counts as
    used, and traps, which no patch mends, are not told. A patch that assumes something of its caller is left
    out unless `vouched` has its id. `allowed` are drifts to go on with, and `backend` is one of
    `hardware.CHOICES`. Neither torch nor megatron is imported. Called again with the same words it does
    nothing.

    Raises UsageError for unknown words and ids, EnvironmentUnfit where there is no megatron-core, PatchError,
    with nothing patched, where a patch that is needed fits no more, where another patcher or another plan was
    there before, and where somebody has imported what is to be replaced by value.
    """
    found, made = planned(packages.importable(), features, vouched=vouched, allowed=allowed, backend=backend)
    if made == applying.in_force():
        return made
    if held := applying.out_of_reach(made):
        raise PatchError("Enable the patches before these are imported from megatron:", held)
    applying.apply(made)
    _tell(found)
    return made


def planned(
    of: Stack,
    features: Iterable[str] | None = None,
    *,
    vouched: Collection[str] = (),
    allowed: Collection[str] = (),
    backend: str = "auto",
) -> tuple[Survey, PatchPlan]:
    """What `enable` decides, and applies, in a program that imports from `of`; raises as it does."""
    used, table = words.known(features or ()), load()
    if of.megatron.core is None:
        archive = of.megatron.archive
        raise EnvironmentUnfit(
            f"megatron-core is in a zip, which cannot be patched: {archive}"
            if archive
            else "there is no megatron-core to patch: this Python imports none; install one beside "
            "mcore-bundle, or put its tree on PYTHONPATH"
        )
    found = survey(
        installed(of, table),
        table,
        of,
        backend=hardware.detect(backend).backend,
        features=used,
        allowed=allowed,
        vouched=vouched,
    )
    # A trap is a matter of what the program does, which is not ours to refuse: it is told.
    decisions = (d if d.action is not Action.TRAP else replace(d, stops=False) for d in found.decisions)
    return found, plan.make(found._replace(decisions=tuple(decisions)))


def _tell(found: Survey) -> None:
    """Logs what was decided; where nobody has set up logging, as a rank of ours does."""
    if not logging.getLogger("bundle").hasHandlers():
        rank = os.environ.get("RANK", "")
        log.start(int(rank) if rank.isdecimal() else None)
    _log.info("%s", "\n".join(lines(found)))
    for decision in found.decisions:
        if decision.stops and decision.action is Action.TRAP:
            _log.warning("no patch mends %s", decision.problem)


def lines(found: Survey) -> Iterator[str]:
    """The plan: what is applied, what is not although the program may need it, and why."""
    left_out = [d for d in found.decisions if d.action in (Action.DRIFT, Action.OWNED, Action.UNVOUCHED)]
    yield f"{len(found.applied)} patches for {found.subject}"
    for decision in (*found.applied, *left_out):
        yield f"  {decision.action} {decision.id}: {decision.reason}"
    if any(decision.action is Action.UNVOUCHED for decision in left_out):
        yield "  (UNVOUCHED ones are applied where their ids are in `vouched`, or after --vouch)"
