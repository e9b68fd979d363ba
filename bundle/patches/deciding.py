"""The decision about each patch: a pure function of what was read and of the job."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from bundle.environment import packages
from bundle.patches import mindspeed
from bundle.patches.entry import (
    LOCAL_LAYERS,
    NOTHING,
    Action,
    Decision,
    Patch,
    Presence,
    Replacement,
    Seam,
    Trap,
)
from bundle.patches.subject import Reading


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchContext:
    """What the decisions depend on besides megatron's own code."""

    version: str | None  # of megatron-core, as it calls itself
    backend: str | None = None  # None: all of them
    features: frozenset[str] | None = None  # of the recipe; None: all of them count as on
    packages: Mapping[str, str] = field(default_factory=dict)  # versions of what is installed beside it
    mindspeed: tuple[str | None] | None = None  # its commit, where it is in the process
    adapted: bool = False  # by us: the job trains through it (backend_options.mindspeed)
    unread: str | None = None  # what else replaces parts of megatron-core on NPUs, and nobody read which
    conflict: str | None = None  # why megatron itself is not one tree
    requested: frozenset[str] = frozenset()  # opt-in patches, by id
    allowed: frozenset[str] = frozenset()  # drifts that the user has looked at, by id
    vouched: frozenset[str] | None = None  # ids whose `assumes` is so; None: all, as in what our engine calls

    def uses(self, features: frozenset[str]) -> bool:
        """Whether the job uses all of these features."""
        return self.features is None or features <= self.features

    def vouches_for(self, patch: Patch) -> bool:
        """Whether the patch's caller is known to be what it assumes."""
        return self.vouched is None or patch.assumes in ("", NOTHING) or patch.id in self.vouched

    def runs_on(self, backends: Iterable[str]) -> bool:
        """Whether the job's backend is one of these."""
        return self.backend is None or self.backend in backends


class _Verdict(NamedTuple):
    action: Action
    reason: str
    proven: bool = True


def decide(patch: Patch, reading: Reading, job: PatchContext) -> Decision:
    """What to do about a patch."""
    verdict = _by_number(patch, job) if reading.evidence is None else _by_source(patch, reading, job)
    unneeded = _unneeded(patch, job)
    # A drift that this job does not meet is still worth a warning; nothing else is.
    warning = verdict.action is Action.DRIFT and job.runs_on(patch.backends) and not patch.opt_in
    if unneeded and verdict.action is not Action.SKIP and not warning:
        verdict = verdict._replace(action=Action.SKIP, reason=unneeded)
    elif not unneeded and verdict.action is not Action.SKIP and not job.vouches_for(patch):
        verdict = verdict._replace(action=Action.UNVOUCHED, reason=f"nobody says that {patch.assumes}")
    blocked = verdict.action in (Action.DRIFT, Action.CONFLICT) and not unneeded
    refused = patch.id in job.requested and verdict.action is not Action.APPLY
    return Decision(
        id=patch.id,
        action=verdict.action,
        reason=verdict.reason,
        range=patch.range,
        evidence=reading.evidence or Presence.UNKNOWN,
        proven=verdict.proven,
        targets=tuple(replacement.target for replacement in _present(patch, reading)),
        fingerprints=tuple(reading.fingerprints.values()),
        assumes=patch.assumes,
        stops=refused or (blocked and patch.id not in job.allowed),
    )


def decide_trap(trap: Trap, reading: Reading, job: PatchContext) -> Decision | None:
    """TRAP where the job meets it, which stops a job whose recipe is known; None where it does not."""
    avoided = job.features is not None and bool(trap.unless & job.features)
    if avoided or not job.runs_on(trap.backends) or not job.uses(trap.when):
        return None
    if reading.evidence is Presence.ABSENT:
        return None
    proven = reading.evidence is Presence.PRESENT
    # A number that cannot be placed is no reason to let a job go wrong silently.
    met = proven or packages.within(job.version or "", trap.range) is not False
    reason = f"{trap.why} {trap.instead}" if met else ""
    return Decision(
        id=trap.id,
        action=Action.TRAP if met else Action.SKIP,
        reason=reason if proven else f"{reason} {_by_what(reading, job)}".strip(),
        range=trap.range,
        evidence=reading.evidence or Presence.UNKNOWN,
        proven=proven,
        stops=met and job.features is not None,
    )


def _by_what(reading: Reading, job: PatchContext) -> str:
    """What decided about a trap, where no source did."""
    why = "the code is unfamiliar" if reading.evidence else "give --mcore PATH to have its source read"
    return f"(By the number {job.version} alone: {reading.trouble or why}.)"


def decide_seam(seam: Seam, reading: Reading | None, job: PatchContext) -> Decision | None:
    """A warning that what the bundle relies on is not as reviewed; None where it is."""
    if reading is None or not job.uses(seam.when) or packages.within(job.version or "", seam.range) is False:
        return None
    changed = [target for target in reading.fingerprints if not reading.reviewed.get(target)]
    if reading.fingerprints and not changed and not reading.trouble:
        return None
    gone = "" if reading.fingerprints else f"{' and '.join(seam.targets)} are gone"
    reason = reading.trouble or gone or f"{', '.join(changed)} is not as reviewed"
    return Decision(
        id=seam.id,
        action=Action.DRIFT,
        reason=f"{reason}; {seam.use}. {seam.why}",
        range=seam.range,
        evidence=Presence.UNKNOWN,
        proven=True,
        targets=tuple(reading.fingerprints),
        fingerprints=tuple(reading.fingerprints.values()),
    )


def exclude(decisions: Iterable[Decision], patches: Mapping[str, Patch]) -> tuple[Decision, ...]:
    """The decisions, with CONFLICT for patches that cannot share a target with each other."""
    decisions = tuple(decisions)
    standing: dict[str, list[str]] = {}
    for decision in decisions:
        for target in decision.targets if decision.action is Action.APPLY else ():
            standing.setdefault(target, []).append(decision.id)
    clashes: dict[str, str] = {}
    for target, ids in standing.items():
        exclusive = any(
            replacement.exclusive
            for patch_id in ids
            for replacement in patches[patch_id].replacements
            if replacement.target == target
        )
        if exclusive and len(ids) > 1:
            clashes |= {i: f"{' and '.join(ids)} replace {target}, and only one can" for i in ids}
    return tuple(
        decision._replace(action=Action.CONFLICT, reason=clashes[decision.id], stops=True)
        if decision.id in clashes
        else decision
        for decision in decisions
    )


def _unneeded(patch: Patch, job: PatchContext) -> str | None:
    """Why the job does not need the patch, whatever is in the source; None where it does."""
    if not job.runs_on(patch.backends):
        return f"for {' and '.join(patch.backends)} only"
    if job.adapted and patch.backends == LOCAL_LAYERS:
        return "for layers of megatron's own; MindSpeed has Transformer Engine's names"
    if patch.opt_in and patch.id not in job.requested:
        return f"opt-in: --request {patch.id} asks for it"
    if not job.uses(patch.when):
        return f"the recipe does not use {', '.join(sorted(patch.when - (job.features or frozenset())))}"
    for name, specifier in patch.requires:
        if name in job.packages and packages.within(job.packages[name], specifier) is False:
            return f"only with {name}{specifier}; {name} {job.packages[name]} is installed"
    return None


def _by_source(patch: Patch, reading: Reading, job: PatchContext) -> _Verdict:
    """The decision where source was read, now or when the list was made."""
    inside = packages.within(job.version, patch.range) if job.version else None
    known = reading.evidence is not Presence.UNKNOWN
    if reading.evidence is Presence.ABSENT:
        return _Verdict(Action.SKIP, "fixed here, or not yet introduced")
    if not known and inside is False:
        return _Verdict(
            Action.SKIP,
            f"{job.version} is outside {patch.range}; {reading.trouble or 'its code is unfamiliar'}",
            False,
        )
    owner = _owner(patch, job)
    if owner and (job.adapted or patch.id not in job.requested):
        return _Verdict(Action.OWNED, owner, known and _mindspeed_is_known(job))
    if job.conflict:
        return _Verdict(Action.CONFLICT, job.conflict, known)
    drift = _drift(patch, reading) or _unread_owner(patch, job)
    if drift and (patch.id not in job.allowed or _missing(patch, reading)):
        return _Verdict(Action.DRIFT, f"{drift}, or go on with --allow-drift {patch.id}", known)
    if drift:
        return _Verdict(Action.APPLY, f"allowed, although {drift}", known)
    reason = "the defect is here"
    if inside is False:
        reason += f", although {job.version} is outside {patch.range}: the number lies"
    for name, specifier in patch.requires:
        if name not in job.packages:
            reason += f"; {name} is not installed here and taken for {specifier}"
    if job.features is not None and "attention-auto" in job.features and "attention-flash" in patch.when:
        reason += "; attention: auto is taken for flash"
    return _Verdict(Action.APPLY, reason)


def _by_number(patch: Patch, job: PatchContext) -> _Verdict:
    """The decision where there is nothing but a version that was not reviewed."""
    inside = job.version is not None and packages.within(job.version, patch.range)
    reason = (
        f"{job.version} is no released version and {'inside' if inside else 'outside'} "
        f"{patch.range or 'every range'} by its number alone: give --mcore PATH to have its source read"
    )
    return _Verdict(Action.APPLY if inside else Action.SKIP, reason, False)


def _mindspeed_is_known(job: PatchContext) -> bool:
    return job.mindspeed is not None and mindspeed.known(job.mindspeed[0])


def _owner(patch: Patch, job: PatchContext) -> str | None:
    """Why a target of the patch is MindSpeed's; None where it is not."""
    if job.mindspeed is None or not job.runs_on(("ascend",)):
        return None
    owned = mindspeed.owned_in_our_jobs if job.adapted else mindspeed.owned
    owners = (owned(replacement.target, job.mindspeed[0]) for replacement in patch.replacements)
    return next((owner for owner in owners if owner), None)


def _unread_owner(patch: Patch, job: PatchContext) -> str | None:
    if job.unread is None or not job.runs_on(("ascend",)):
        return None
    targets = ", ".join(replacement.target for replacement in patch.replacements)
    return f"{job.unread} may own {targets}: what it replaces was not read; look there"


def _drift(patch: Patch, reading: Reading) -> str | None:
    """Why nobody can say that the wrapper fits this tree, and what to do; None where it was reviewed."""
    if reading.trouble:
        return f"{reading.trouble}; look there"
    if reading.evidence is Presence.UNKNOWN:
        return f"the code is unfamiliar where the defect would be; read {', '.join(patch.evidence)}"
    missing = _missing(patch, reading)
    if missing:
        gone = ", ".join(f"{target} ({_nearest(target, reading)})" for target in missing)
        return f"the defect is there, but its target is not: {gone}; point the patch at its new home"
    changed = [target for target in reading.fingerprints if not reading.reviewed.get(target)]
    if changed:
        return (
            f"the defect is there, but {', '.join(changed)} is not as reviewed; compare it with a release "
            "and record it in a checkout: `python -m tools.patches.review PATH --write`"
        )
    return None


def _nearest(target: str, reading: Reading) -> str:
    names = reading.nearest.get(target, ())
    return f"nearest: {', '.join(names)}" if names else "nothing like it"


def _missing(patch: Patch, reading: Reading) -> list[str]:
    """The targets that have to be there and are not; an optional one only when all are gone."""
    gone = [r for r in patch.replacements if r.target not in reading.fingerprints]
    return [r.target for r in gone if not r.optional or len(gone) == len(patch.replacements)]


def _present(patch: Patch, reading: Reading) -> list[Replacement]:
    """The replacements that this megatron has a target for; all of them where nothing was read."""
    present = [r for r in patch.replacements if r.target in reading.fingerprints]
    return present or list(patch.replacements)
