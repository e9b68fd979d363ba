"""The audit: megatron-core's defects in an environment, what its framework mends, and what to do."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from bundle.environment.packages import InstalledPackages, Package, parse_minor_version
from bundle.patches import decision_rules, frameworks, plan
from bundle.patches.catalogue import PATCHES, TRAPS
from bundle.patches.decision_rules import PatchContext, format_allow_drift_hint
from bundle.patches.definitions import Definitions
from bundle.patches.entry import (
    LOCAL_LAYER_BACKENDS,
    Decision,
    DefectKind,
    Patch,
    PatchAction,
    Presence,
    Trap,
)
from bundle.patches.megatron_core import DefectReader, MegatronCore, ReviewTable
from bundle.patches.monkey_patches import MonkeyPatch
from bundle.patches.source import SourceTree

Entry = Patch | Trap
ENTRIES: tuple[Entry, ...] = (*PATCHES, *TRAPS)


class DefectStatus(StrEnum):
    """The state of a defect in the environment. A defect without one of these states is not listed."""

    PRESENT = "present"
    MENDED = "mended"  # by the framework
    CONDITIONAL = "conditional"  # the framework mends it in some of its jobs
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class AuditedDefect:
    """One entry of the catalogue that concerns the environment."""

    entry: Entry
    status: DefectStatus
    reason: str  # why it has this status
    proven: bool  # source was read, now or when the list was made
    patched_by: tuple[MonkeyPatch, ...] = ()  # the framework's replacements that matter to it
    fixing_minor: str | None = None  # the minor from which on no reviewed release has it
    has_patch: bool = False  # our patch fits this code

    @property
    def is_silent_and_present(self) -> bool:
        """True if a silent defect is present: the job runs the code, and no error or message shows it."""
        return self.entry.kind is DefectKind.SILENT and self.status is DefectStatus.PRESENT


@dataclass(frozen=True)
class Upgrade:
    """The newest reviewed release of a later minor, and the silent defects that reach the same job there."""

    release: str
    remaining_ids: tuple[str, ...]  # ids that reach the environment now, too
    new_ids: tuple[str, ...]


@dataclass(frozen=True)
class Audit:
    """The findings of an audit of one environment."""

    core: MegatronCore
    frameworks: tuple[Package, ...]
    monkey_patches: tuple[MonkeyPatch, ...]  # of the frameworks, on evidence and targets of the catalogue
    defects: tuple[AuditedDefect, ...]
    upgrades: tuple[Upgrade, ...]

    @property
    def present_silent_defects(self) -> tuple[AuditedDefect, ...]:
        """The silent defects that reach the job."""
        return tuple(defect for defect in self.defects if defect.is_silent_and_present)


def audit(
    core: MegatronCore, table: ReviewTable, stack: InstalledPackages, features: frozenset[str] | None
) -> Audit:
    """Audit a megatron-core and the frameworks of `stack` for a job with these features (None: any)."""
    entries = [entry for entry in ENTRIES if _concerns(entry, features)]
    job, unpatched_reader, packages = (
        plan.build_context(core, stack, features=features),
        core.build_reader(table),
        stack.find_megatron_frameworks(),
    )
    decisions = {entry.id: _decide_unless_unmet_trap(entry, unpatched_reader, job) for entry in entries}
    defects = {entry.id: _build_core_only_defect(entry, decisions[entry.id]) for entry in entries}
    monkey_patches, framework_defects = audit_framework_patches(
        packages, entries, core, unpatched_reader, job
    )
    audited = [
        _with_remedy(d, core, table, decisions[d.entry.id])
        for d in (defects | framework_defects).values()
        if d is not None
    ]
    reaching = [defect.entry.id for defect in audited if defect.is_silent_and_present]
    return Audit(
        core,
        packages,
        monkey_patches,
        tuple(audited),
        tuple(_assess_later_minors(reaching, entries, core, table)),
    )


def audit_framework_patches(
    packages: Collection[Package],
    entries: Collection[Entry],
    core: MegatronCore,
    unpatched_reader: DefectReader,
    job: PatchContext,
) -> tuple[tuple[MonkeyPatch, ...], dict[str, AuditedDefect]]:
    """Return the monkey patches of frameworks, and by id the defects that these monkey patches change."""
    if core.root is None or not packages:
        return (), {}
    defects, table = {}, unpatched_reader.table
    megatron = unpatched_reader.definitions or Definitions(SourceTree(core.root))
    monkey_patches = frameworks.find_monkey_patches(packages, megatron, entries)
    unconditional_reader = frameworks.build_patched_reader(
        megatron, table, (patch for patch in monkey_patches if not patch.conditions)
    )
    patched_reader = frameworks.build_patched_reader(megatron, table, monkey_patches)
    for entry in entries if monkey_patches else ():
        touching = patched_reader.find_evidence_changing_patches(entry)
        wrappers = frameworks.find_wrapping_patches(entry, monkey_patches) if isinstance(entry, Patch) else ()
        unpatched = _to_job_presence_or_absent(_decide_unless_unmet_trap(entry, unpatched_reader, job))
        unconditional = (
            _to_job_presence_or_absent(_decide_unless_unmet_trap(entry, unconditional_reader, job))
            if unconditional_reader.find_evidence_changing_patches(entry)
            else unpatched
        )
        patched = (
            _to_job_presence_or_absent(_decide_unless_unmet_trap(entry, patched_reader, job))
            if touching
            else unpatched
        )
        states = unpatched, unconditional, patched
        if defect := _build_framework_defect(entry, states, touching, wrappers):
            defects[entry.id] = defect
    return monkey_patches, defects


def _concerns(entry: Entry, features: frozenset[str] | None) -> bool:
    """Return whether a job with these features meets the entry.

    The job runs on accelerators, with the layers of their libraries.
    """
    if set(entry.backends) <= set(LOCAL_LAYER_BACKENDS) or (isinstance(entry, Patch) and entry.opt_in):
        return False
    avoided = isinstance(entry, Trap) and features is not None and bool(entry.unless & features)
    return not avoided and (features is None or entry.when <= features)


def _decide_unless_unmet_trap(entry: Entry, reader: DefectReader, job: PatchContext) -> Decision | None:
    """Return the decision about an entry by what the reader reads; None for a trap that is absent."""
    reading = reader.read(entry)
    if isinstance(entry, Patch):
        return decision_rules.decide_patch(entry, reading, job)
    return decision_rules.decide_trap(entry, reading, job)


def _to_job_presence_or_absent(decision: Decision | None) -> Presence:
    """Return whether the defect is present, by the decision about it.

    A patch that is skipped although the defect is in the source counts as ABSENT: this job does not need it.
    """
    if decision is None:
        return Presence.ABSENT  # a trap that is not met
    if decision.presence is Presence.PRESENT:
        if decision.action is PatchAction.SKIP:
            return Presence.ABSENT
        return Presence.UNKNOWN if decision.action is PatchAction.OWNED else Presence.PRESENT
    return decision.presence


def _build_core_only_defect(entry: Entry, decision: Decision | None) -> AuditedDefect | None:
    """Return the defect as megatron-core alone has it, without any framework; None where it is absent."""
    presence = _to_job_presence_or_absent(decision)
    if presence is Presence.ABSENT or decision is None:
        return None
    status = DefectStatus.PRESENT if presence is Presence.PRESENT else DefectStatus.UNKNOWN
    reason = "" if status is DefectStatus.PRESENT else decision.reason
    reason = reason.removesuffix(f". {format_allow_drift_hint(entry.id)}")
    if isinstance(entry, Trap):
        reason = reason.removeprefix(f"{entry.why} {entry.instead} ")
    return AuditedDefect(entry=entry, status=status, reason=reason, proven=decision.proven)


def _build_framework_defect(
    entry: Entry,
    states: tuple[Presence, Presence, Presence],
    touching: tuple[MonkeyPatch, ...],
    wrappers: tuple[MonkeyPatch, ...],
) -> AuditedDefect | None:
    """Return the defect as the framework's monkey patches leave it; None where they change nothing.

    `states` holds the presence without monkey patches, with those that are always in place, and with all of
    them.
    """
    unpatched, unconditional, patched = states
    always_applied = tuple(patch for patch in touching if not patch.conditions)
    not_read_note = f"Whether this fixes the defect {entry.id} is unknown"

    def build_defect(
        status: DefectStatus, detail: str, monkey_patches: tuple[MonkeyPatch, ...]
    ) -> AuditedDefect:
        return AuditedDefect(
            entry=entry,
            status=status,
            reason=f"{describe_replacements(monkey_patches)}{detail}",
            proven=True,
            patched_by=monkey_patches,
        )

    if always_applied and unconditional is not unpatched:
        if unconditional is Presence.ABSENT:
            return build_defect(
                DefectStatus.MENDED, f". The replacement does not have the defect {entry.id}", always_applied
            )
        if unconditional is Presence.PRESENT:
            return build_defect(
                DefectStatus.PRESENT, f". The replacement has the defect {entry.id}", always_applied
            )
        return build_defect(
            DefectStatus.UNKNOWN,
            f". mcore-bundle does not know the replacement's code. {not_read_note}",
            always_applied,
        )
    if always_applied and unconditional is Presence.PRESENT:
        return build_defect(DefectStatus.PRESENT, f", but the defect {entry.id} remains", always_applied)
    if unconditional is Presence.ABSENT and patched is Presence.ABSENT:
        return None
    if any(
        isinstance(entry, Patch) and frameworks.is_fixed_by_reviewed_wrapper(entry, patch)
        for patch in wrappers
    ):
        detail = f". This wrapper was reviewed and fixes the defect {entry.id}"
        return build_defect(DefectStatus.MENDED, detail, wrappers)
    if unconditional is Presence.PRESENT and any(not patch.conditions for patch in wrappers):
        return build_defect(DefectStatus.UNKNOWN, f". {not_read_note}", wrappers)
    if unconditional is not patched:
        if patched is Presence.ABSENT:
            verb = "has" if unconditional is Presence.PRESENT else "may have"
            otherwise = (
                f"It runs only under that condition; otherwise the original runs and {verb} the defect"
            )
            return build_defect(
                DefectStatus.CONDITIONAL,
                f". The replacement does not have the defect {entry.id}. {otherwise}",
                touching,
            )
        finding = (
            f"The replacement has the defect {entry.id}"
            if patched is Presence.PRESENT
            else f"mcore-bundle does not know the replacement's code. {not_read_note}"
        )
        status = DefectStatus.PRESENT if unconditional is Presence.PRESENT else DefectStatus.UNKNOWN
        return build_defect(status, f". {finding}", touching)
    if unconditional is Presence.PRESENT and wrappers:
        return build_defect(DefectStatus.PRESENT, f". {not_read_note}", wrappers)
    return None


def describe_replacements(patches: tuple[MonkeyPatch, ...]) -> str:
    """Return the words for a message: which framework replaces or wraps which name, where and when."""
    descriptions = [
        f"{p.framework} {'wraps' if p.wraps else 'replaces'} {p.name} ({p.location}, {p.when})"
        for p in patches
    ]
    return " and ".join(descriptions)


def _with_remedy(
    defect: AuditedDefect, core: MegatronCore, table: ReviewTable, decision: Decision | None
) -> AuditedDefect:
    """Return the defect with its remedies: the minor that fixes it, and whether our patch fits."""
    is_applied = decision is not None and decision.action is PatchAction.APPLY and decision.proven
    return replace(
        defect,
        fixing_minor=_find_fixing_minor(defect.entry, core, table),
        has_patch=is_applied and isinstance(defect.entry, Patch) and not defect.patched_by,
    )


def _find_fixing_minor(entry: Entry, core: MegatronCore, table: ReviewTable) -> str | None:
    """Return the first later minor from which on every reviewed release was read to lack the defect."""
    first = None
    for release in _list_later_reviewed_releases(core, table):
        if table.find_presence(entry.id, release) is not Presence.ABSENT:
            first = None
        else:
            first = first or release
    return ".".join(first.split(".")[:2]) if first else None


def _list_later_reviewed_releases(core: MegatronCore, table: ReviewTable) -> list[str]:
    """Return the reviewed releases of later minors than this megatron-core's own, oldest first."""
    minor = parse_minor_version(core.version) if core.version else None
    releases = [reference for reference in table.references if "+" not in reference]
    return [release for release in releases if minor and (parse_minor_version(release) or minor) > minor]


def _assess_later_minors(
    reaching: Collection[str], entries: Collection[Entry], core: MegatronCore, table: ReviewTable
) -> Iterator[Upgrade]:
    """Yield the newest release of each later minor, with the silent defects that the same job meets there.

    Yields nothing where no silent defect reaches the job now.
    """
    newest = {parse_minor_version(release): release for release in _list_later_reviewed_releases(core, table)}
    for release in newest.values() if reaching else ():
        present_ids = [
            entry.id
            for entry in entries
            if entry.kind is DefectKind.SILENT and table.find_presence(entry.id, release) is Presence.PRESENT
        ]
        yield Upgrade(
            release,
            tuple(name for name in present_ids if name in reaching),
            tuple(name for name in present_ids if name not in reaching),
        )
