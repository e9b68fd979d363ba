"""The decision about each patch: a pure function of the findings in the source and of the job."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from bundle.environment import packages
from bundle.patches import mindspeed
from bundle.patches.entry import (
    LOCAL_LAYER_BACKENDS,
    NO_CALLER_ASSUMPTION,
    Decision,
    Patch,
    PatchAction,
    Presence,
    Replacement,
    Seam,
    Trap,
)
from bundle.patches.megatron_core import Reading

_UNFAMILIAR_CODE_PHRASE = "unfamiliar (neither the known defective nor the known correct code)"


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchContext:
    """Everything that the decisions depend on besides megatron-core's own code."""

    version: str | None  # of megatron-core, as it calls itself
    backend: str | None = None  # None: all of them
    features: frozenset[str] | None = None  # of the recipe; None: all of them count as on
    packages: Mapping[str, str] = field(default_factory=dict)  # versions of other installed packages
    mindspeed: tuple[str | None] | None = None  # its commit, where it is in the process
    trains_with_mindspeed: bool = False  # by us: the job trains through it (backend_options.mindspeed)
    unread_patcher: str | None = (
        None  # another patcher of megatron-core on NPUs, whose targets nobody has read
    )
    conflict: str | None = None  # why megatron itself is not one tree
    requested: frozenset[str] = frozenset()  # opt-in patches, by id
    allowed: frozenset[str] = frozenset()  # drifts that the user has looked at, by id
    vouched: frozenset[str] | None = None  # ids whose `assumes` holds; None: all, as in our engine's jobs

    def has_all_features(self, features: frozenset[str]) -> bool:
        """Return whether the job uses all of these features."""
        return self.features is None or features <= self.features

    def has_no_unvouched_assumption(self, patch: Patch) -> bool:
        """Return whether somebody vouches for the patch: that its caller is what the patch assumes."""
        return self.vouched is None or patch.assumes in ("", NO_CALLER_ASSUMPTION) or patch.id in self.vouched

    def runs_on(self, backends: Iterable[str]) -> bool:
        """Return whether the job's backend is one of these."""
        return self.backend is None or self.backend in backends


class _Proposal(NamedTuple):
    action: PatchAction
    reason: str
    proven: bool = True


def decide_patch(patch: Patch, reading: Reading, job: PatchContext) -> Decision:
    """Return the decision about a patch."""
    proposal = (
        _decide_by_version(patch, job) if reading.presence is None else _decide_by_source(patch, reading, job)
    )
    unneeded_reason = _explain_unneeded(patch, job)
    # A drift that this job does not meet is still worth a warning; nothing else is.
    warning = proposal.action is PatchAction.DRIFT and job.runs_on(patch.backends) and not patch.opt_in
    if unneeded_reason and proposal.action is not PatchAction.SKIP and not warning:
        proposal = proposal._replace(action=PatchAction.SKIP, reason=unneeded_reason)
    elif (
        not unneeded_reason
        and proposal.action is not PatchAction.SKIP
        and not job.has_no_unvouched_assumption(patch)
    ):
        proposal = proposal._replace(action=PatchAction.UNVOUCHED, reason=f"not vouched for: {patch.assumes}")
    blocked = proposal.action in (PatchAction.DRIFT, PatchAction.CONFLICT) and not unneeded_reason
    refused = patch.id in job.requested and proposal.action is not PatchAction.APPLY
    return Decision(
        id=patch.id,
        action=proposal.action,
        reason=proposal.reason,
        range=patch.range,
        presence=reading.presence or Presence.UNKNOWN,
        proven=proposal.proven,
        targets=tuple(
            replacement.target for replacement in _list_present_or_all_replacements(patch, reading)
        ),
        fingerprints=tuple(reading.fingerprints.values()),
        assumes=patch.assumes,
        stops=refused or (blocked and patch.id not in job.allowed),
    )


def decide_trap(trap: Trap, reading: Reading, job: PatchContext) -> Decision | None:
    """Return the decision about a trap; None where the job does not meet it.

    The action is TRAP where the job meets it. It stops a job whose recipe is known.
    """
    avoided = job.features is not None and bool(trap.unless & job.features)
    if avoided or not job.runs_on(trap.backends) or not job.has_all_features(trap.when):
        return None
    if reading.presence is Presence.ABSENT:
        return None
    proven = reading.presence is Presence.PRESENT
    # A version that cannot be placed must not let a job go wrong silently.
    is_met = proven or packages.is_base_version_within(job.version or "", trap.range) is not False
    reason = f"{trap.why} {trap.instead}" if is_met else ""
    return Decision(
        id=trap.id,
        action=PatchAction.TRAP if is_met else PatchAction.SKIP,
        reason=reason if proven else f"{reason} {_explain_version_only(reading, job)}".strip(),
        range=trap.range,
        presence=reading.presence or Presence.UNKNOWN,
        proven=proven,
        stops=is_met and job.features is not None,
    )


def _explain_version_only(reading: Reading, job: PatchContext) -> str:
    """Return the note that a version number alone decided about a trap, because no source did."""
    how = f"Decided by the version number {job.version} alone"
    how = how if job.version else "Without a version number the defect is assumed"
    if reading.presence or reading.read_error:
        cause = (
            f". The reason: {reading.read_error}"
            if reading.read_error
            else f", because the code is {_UNFAMILIAR_CODE_PHRASE}"
        )
        return f"({how}{cause}.)"
    return f"({how}. Pass --mcore PATH to read the source.)"


def build_seam_drift_warning(seam: Seam, reading: Reading | None, job: PatchContext) -> Decision | None:
    """Return a warning that the names of a seam are not as reviewed; None where they are."""
    if (
        reading is None
        or not job.has_all_features(seam.when)
        or packages.is_base_version_within(job.version or "", seam.range) is False
    ):
        return None
    changed = [target for target in reading.fingerprints if not reading.references.get(target)]
    if reading.fingerprints and not changed and not reading.read_error:
        return None
    names = changed if reading.fingerprints else seam.targets
    is_one, has_code = len(names) == 1, bool(reading.fingerprints)
    verb = ("differs" if is_one else "differ") if has_code else ("does" if is_one else "do")
    rest = "from the reviewed code" if has_code else "not exist in the installed megatron-core"
    reason = reading.read_error or f"{' and '.join(names)} {verb} {rest}"
    return Decision(
        id=seam.id,
        action=PatchAction.DRIFT,
        reason=f"{reason}, but mcore-bundle relies on {'it' if is_one else 'them'} ({seam.use}). {seam.why}"
        " Use a release of megatron-core that docs/patches.md lists",
        range=seam.range,
        presence=Presence.UNKNOWN,
        proven=True,
        targets=tuple(reading.fingerprints),
        fingerprints=tuple(reading.fingerprints.values()),
    )


def mark_conflicts(decisions: Iterable[Decision], patches: Mapping[str, Patch]) -> tuple[Decision, ...]:
    """Return the decisions, with CONFLICT for patches that cannot share a target with each other."""
    decisions = tuple(decisions)
    ids_by_target: dict[str, list[str]] = {}
    for decision in decisions:
        for target in decision.targets if decision.action is PatchAction.APPLY else ():
            ids_by_target.setdefault(target, []).append(decision.id)
    clashes: dict[str, str] = {}
    for target, ids in ids_by_target.items():
        exclusive = any(
            replacement.exclusive
            for patch_id in ids
            for replacement in patches[patch_id].replacements
            if replacement.target == target
        )
        if exclusive and len(ids) > 1:
            clashes |= {i: f"{' and '.join(ids)} replace {target}, but only one may" for i in ids}
    return tuple(
        decision._replace(action=PatchAction.CONFLICT, reason=clashes[decision.id], stops=True)
        if decision.id in clashes
        else decision
        for decision in decisions
    )


def _explain_unneeded(patch: Patch, job: PatchContext) -> str | None:
    """Return why the job does not need the patch, whatever the source says; None where the job needs it."""
    if not job.runs_on(patch.backends):
        return f"needed only on {' and '.join(patch.backends)}"
    if job.trains_with_mindspeed and patch.backends == LOCAL_LAYER_BACKENDS:
        return (
            "needed only for megatron's local layers; this job uses MindSpeed's layers under the names of"
            " Transformer Engine's"
        )
    if patch.opt_in and patch.id not in job.requested:
        return f"opt-in: request it with --request {patch.id}"
    if not job.has_all_features(patch.when):
        unused = ", ".join(sorted(patch.when - (job.features or frozenset())))
        return f"the recipe does not use the feature {unused}"
    for name, specifier in patch.requires:
        if name in job.packages and packages.is_base_version_within(job.packages[name], specifier) is False:
            return f"needed only with {name}{specifier}, but {name} {job.packages[name]} is installed"
    return None


def _decide_by_source(patch: Patch, reading: Reading, job: PatchContext) -> _Proposal:
    """Return the decision from source that was read, either now or when the reviewed list was made."""
    is_in_range = packages.is_base_version_within(job.version, patch.range) if job.version else None
    is_proven = reading.presence is not Presence.UNKNOWN
    if reading.presence is Presence.ABSENT:
        return _Proposal(PatchAction.SKIP, "this megatron-core does not have the defect")
    if not is_proven and is_in_range is False:
        return _Proposal(
            PatchAction.SKIP,
            f"megatron-core {job.version} is outside the patch's range {patch.range}, and"
            f" {reading.read_error or 'its code is ' + _UNFAMILIAR_CODE_PHRASE}",
            False,
        )
    ownership = _explain_mindspeed_replacement(patch, job)
    if ownership and (job.trains_with_mindspeed or patch.id not in job.requested):
        return _Proposal(PatchAction.OWNED, ownership, is_proven and _is_known_mindspeed(job))
    if job.conflict:
        return _Proposal(PatchAction.CONFLICT, job.conflict, is_proven)
    drift = _explain_drift_and_remedy(patch, reading) or _explain_unread_ascend_patcher(patch, job)
    if drift and (patch.id not in job.allowed or _list_missing_required_targets(patch, reading)):
        reason = f"{'. '.join(drift)}. {format_allow_drift_hint(patch.id)}"
        return _Proposal(PatchAction.DRIFT, reason, is_proven)
    if drift:
        return _Proposal(PatchAction.APPLY, f"applied because --allow-drift names it: {drift[0]}", is_proven)
    reason = "this megatron-core has the defect"
    if is_in_range is False:
        reason += f": its code decides, not its version number {job.version}, which is outside {patch.range}"
    for name, specifier in patch.requires:
        if name not in job.packages:
            reason += f"; {name}{specifier} is assumed, because {name} is not installed here"
    if job.features is not None and "attention-auto" in job.features and "attention-flash" in patch.when:
        reason += "; model.attention: auto is assumed to be flash"
    return _Proposal(PatchAction.APPLY, reason)


def _decide_by_version(patch: Patch, job: PatchContext) -> _Proposal:
    """Return the decision from a version number that was not reviewed, where there is nothing else."""
    is_in_range = job.version is not None and packages.is_base_version_within(job.version, patch.range)
    reason = (
        f"{job.version} is not a released version and {'inside' if is_in_range else 'outside'}"
        f" {patch.range or 'every range'} by its number alone. Pass --mcore PATH to read its source"
    )
    return _Proposal(PatchAction.APPLY if is_in_range else PatchAction.SKIP, reason, False)


def _is_known_mindspeed(job: PatchContext) -> bool:
    return job.mindspeed is not None and mindspeed.is_reviewed_commit(job.mindspeed[0])


def _explain_mindspeed_replacement(patch: Patch, job: PatchContext) -> str | None:
    """Return why a target of the patch is MindSpeed's; None where it is not."""
    if job.mindspeed is None or not job.runs_on(("ascend",)):
        return None
    explain = (
        mindspeed.explain_job_replacement
        if job.trains_with_mindspeed
        else mindspeed.explain_possible_replacement
    )
    reasons = (explain(replacement.target, job.mindspeed[0]) for replacement in patch.replacements)
    return next((reason for reason in reasons if reason), None)


def _explain_unread_ascend_patcher(patch: Patch, job: PatchContext) -> tuple[str, str] | None:
    if job.unread_patcher is None or not job.runs_on(("ascend",)):
        return None
    targets = ", ".join(replacement.target for replacement in patch.replacements)
    return f"{job.unread_patcher} was not reviewed and may replace {targets}", "Check whether it does"


def _explain_drift_and_remedy(patch: Patch, reading: Reading) -> tuple[str, str] | None:
    """Return why the wrapper may not fit this tree, and what to do; None where the code was reviewed."""
    if reading.read_error:
        return reading.read_error, "Check this megatron-core"
    if reading.presence is Presence.UNKNOWN:
        cause = "whether this megatron-core has the defect is unknown, because its code is"
        cause += f" {_UNFAMILIAR_CODE_PHRASE}"
        return cause, f"Read the code of {', '.join(patch.evidence_targets)}"
    missing = _list_missing_required_targets(patch, reading)
    if missing:
        gone = ", ".join(f"{target} ({_describe_nearest(target, reading)})" for target in missing)
        cause = f"the defect is present, but the patch's target is missing: {gone}"
        return cause, "Point the patch at the new name"
    changed = [target for target in reading.fingerprints if not reading.references.get(target)]
    if changed:
        return (
            f"the defect is present, but {', '.join(changed)} differs from the reviewed code",
            "Compare the code with a release and record it in a checkout of mcore-bundle:"
            " `python -m tools.patches.review PATH --write`",
        )
    return None


def format_allow_drift_hint(patch_id: str) -> str:
    """Return how a user allows the drift of a patch."""
    return f"To continue nevertheless, add --allow-drift {patch_id}"


def _describe_nearest(target: str, reading: Reading) -> str:
    names = reading.nearest_names.get(target, ())
    return f"nearest: {', '.join(names)}" if names else "no similar name"


def _list_missing_required_targets(patch: Patch, reading: Reading) -> list[str]:
    """Return the required targets that are missing; an optional one only when all targets are."""
    gone = [r for r in patch.replacements if r.target not in reading.fingerprints]
    return [r.target for r in gone if not r.optional or len(gone) == len(patch.replacements)]


def _list_present_or_all_replacements(patch: Patch, reading: Reading) -> list[Replacement]:
    """Return the replacements whose target this megatron-core has; all of them where nothing was read."""
    present = [r for r in patch.replacements if r.target in reading.fingerprints]
    return present or list(patch.replacements)
