"""The patches in a program that is not ours: decided for what it imports, applied, and told."""

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping

from bundle import log
from bundle.environment import hardware, packages
from bundle.environment.packages import Stack
from bundle.errors import EnvironmentUnfit, PatchError
from bundle.patches import applying, audit, plan
from bundle.patches.audit import Defect, Standing
from bundle.patches.catalogue import PATCHES
from bundle.patches.entry import Action, Decision, known_features, shown_features
from bundle.patches.monkey_patches import MonkeyPatch
from bundle.patches.plan import PatchPlan, Survey, context, survey
from bundle.patches.subject import installed, load

_log = logging.getLogger(__name__)
_NEEDED = {patch.id: patch.when for patch in PATCHES}


def enable(
    features: Iterable[str] | None = None,
    *,
    vouched: Collection[str] = (),
    allowed: Collection[str] = (),
    backend: str = "auto",
    strict: bool = False,
) -> PatchPlan:
    """Patches the megatron-core that this process imports, or has imported; the plan is logged, once.

    `features` are words of `entry.FEATURES` for what the program uses; without them everything counts as
    used, and traps, which no patch mends, are not told. A patch that assumes something of its caller is left
    out unless `vouched` has its id, and so is one whose defect a framework beside it mends, or may mend.
    `allowed` are drifts, and frameworks' code that nobody has read, to go on with; `backend` is one of
    `hardware.CHOICES`. Neither torch nor megatron is imported. Called again with the same
    words it does nothing.

    A patch that fits no more stops a program that is known to use what it mends; without `features` it is
    left out and warned of, unless `strict` has it stop there too.

    Raises UsageError for unknown words and ids, EnvironmentUnfit where there is no megatron-core, PatchError,
    with nothing patched, for such a patch, where another patcher or another plan was there before, and where
    somebody has imported what is to be replaced by value.
    """
    found, made = planned(
        packages.importable(), features, vouched=vouched, allowed=allowed, backend=backend, strict=strict
    )
    if made == applying.in_force():
        return made
    if held := applying.out_of_reach(made):
        raise PatchError("Enable the patches before these are imported from megatron:", held)
    applying.apply(made)
    _tell(found, known_features(features or ()))
    return made


def planned(
    of: Stack,
    features: Iterable[str] | None = None,
    *,
    vouched: Collection[str] = (),
    allowed: Collection[str] = (),
    backend: str = "auto",
    strict: bool = False,
) -> tuple[Survey, PatchPlan]:
    """What `enable` decides, and applies, in a program that imports from `of`; raises as it does."""
    used, table = known_features(features or ()), load()
    if of.megatron.core is None:
        archive = of.megatron.archive
        raise EnvironmentUnfit(
            f"megatron-core is in a zip, which cannot be patched: {archive}"
            if archive
            else "there is no megatron-core to patch: this Python imports none; install one beside "
            "mcore-bundle, or put its tree on PYTHONPATH"
        )
    subject, on = installed(of, table), hardware.detect(backend).backend
    found = survey(subject, table, of, backend=on, features=used, allowed=allowed, vouched=vouched)
    needed = {d.id for d in found.decisions if d.action in (Action.APPLY, Action.DRIFT)}
    patches = [patch for patch in PATCHES if patch.id in needed]
    job = context(subject, of, backend=on, features=used)
    put, theirs = audit.beside(of.frameworks(), patches, subject, subject.reader(table), job)
    beyond = {Standing.CONDITIONAL: vouched, Standing.UNKNOWN: allowed}
    decided = (_left_to_framework(d, put, theirs.get(d.id), beyond) for d in found.decisions)
    # What the program does is not ours to refuse: a trap is told, and a patch of what it may not use.
    told = {Action.TRAP} if used is not None or strict else {Action.TRAP, Action.DRIFT}
    decisions = tuple(d if d.action not in told else d._replace(stops=False) for d in decided)
    found = found._replace(decisions=decisions)
    return found, plan.make(found)


def _left_to_framework(
    decision: Decision,
    put: Iterable[MonkeyPatch],
    theirs: Defect | None,
    beyond: Mapping[Standing, Collection[str]],
) -> Decision:
    """OWNED where a framework mends the defect, or has put code of its own in the place that ours is for.

    So it is where it may mend it, unless `beyond` has the patch: twice mended is wrong again. A program may
    be none of the jobs in which it is mended; of code that nobody has read, the caller's say tells nothing.
    """
    placed = tuple(
        patch for patch in put if patch.target in decision.targets and not (patch.wraps or patch.conditions)
    )
    reason = None
    if theirs is not None and theirs.standing is Standing.MENDED:
        reason = theirs.reason
    elif decision.action is Action.APPLY and placed:
        reason = f"{audit.replaced_by(placed)}, which this patch was not read with"
    elif decision.action is Action.APPLY and theirs is not None and theirs.standing is not Standing.PRESENT:
        reason = None if decision.id in beyond[theirs.standing] else theirs.reason
    return decision._replace(action=Action.OWNED, reason=reason, stops=False) if reason else decision


def _tell(found: Survey, used: frozenset[str] | None) -> None:
    """Logs what was decided; where nobody has set up logging, as a rank of ours does."""
    if not logging.getLogger("bundle").hasHandlers():
        rank = os.environ.get("RANK", "")
        log.start(int(rank) if rank.isdecimal() else None)
    _log.info("%s", "\n".join(lines(found)))
    for warning in warnings(found, used):
        _log.warning("%s", warning)


def warnings(found: Survey, used: frozenset[str] | None) -> Iterator[str]:
    """What no patch mends in a program that uses this (None: nobody says), though it meets it or may."""
    for decision in found.decisions:
        if decision.action is Action.TRAP and used is not None:
            yield f"no patch mends {decision.problem}"
        elif decision.action is Action.DRIFT and used is None and decision.id in _NEEDED:
            met = shown_features(_NEEDED[decision.id])
            yield f"left out, and needed {f'if you use {met}' if met else 'in any job'}: {decision.problem}"


def lines(found: Survey) -> Iterator[str]:
    """The plan: what is applied, what is not although the program may need it, and why."""
    left_out = [d for d in found.decisions if d.action in (Action.OWNED, Action.UNVOUCHED)]
    yield f"{len(found.applied)} patches for {found.subject}"
    for decision in (*found.applied, *left_out):
        yield f"  {decision.action} {decision.id}: {decision.reason}"
    if any(decision.action is Action.UNVOUCHED for decision in left_out):
        yield "  (UNVOUCHED ones are applied where their ids are in `vouched`, or after --vouch)"
