"""Which defects of megatron-core an environment has, which its framework mends, and what to do."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from bundle.environment.packages import Package, Stack, minor_version
from bundle.patches import deciding, frameworks, plan
from bundle.patches.catalogue import PATCHES, TRAPS
from bundle.patches.deciding import PatchContext
from bundle.patches.definitions import Definitions
from bundle.patches.entry import LOCAL_LAYERS, Action, Decision, DefectKind, Patch, Presence, Trap
from bundle.patches.monkey_patches import MonkeyPatch
from bundle.patches.source import SourceTree
from bundle.patches.subject import Reader, Subject, Table

Entry = Patch | Trap
ENTRIES: tuple[Entry, ...] = (*PATCHES, *TRAPS)
_UNSEEN = "whether that mends it was not read"


class Standing(StrEnum):
    """What is so in the environment; what is neither is not listed."""

    PRESENT = "present"
    MENDED = "mended"  # by the framework
    CONDITIONAL = "conditional"  # the framework mends it in some of its jobs
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Defect:
    """One entry of the catalogue that concerns the environment."""

    entry: Entry
    standing: Standing
    reason: str  # why it is said to stand so
    proven: bool  # source was read, now or when the list was made
    patched_by: tuple[MonkeyPatch, ...] = ()  # the framework's replacements that matter to it
    mended_in: str | None = None  # the minor from which on no reviewed release has it
    applies: bool = False  # our patch fits this code

    @property
    def reaches(self) -> bool:
        """Whether it is there, in what is used, and nothing tells of it."""
        return self.entry.kind is DefectKind.SILENT and self.standing is Standing.PRESENT


@dataclass(frozen=True)
class Upgrade:
    """The newest reviewed release of a later minor, and which silent defects reach the same job there."""

    release: str
    left: tuple[str, ...]  # ids that reach the environment now, too
    new: tuple[str, ...]


@dataclass(frozen=True)
class Audit:
    """What was found in one environment."""

    subject: Subject
    frameworks: tuple[Package, ...]
    patches: tuple[MonkeyPatch, ...]  # of the frameworks, on what the catalogue asks about
    defects: tuple[Defect, ...]
    upgrades: tuple[Upgrade, ...]

    @property
    def reaching(self) -> tuple[Defect, ...]:
        """The silent defects that reach the job."""
        return tuple(defect for defect in self.defects if defect.reaches)


def audit(of: Subject, table: Table, stack: Stack, features: frozenset[str] | None) -> Audit:
    """What a megatron-core does to a job with these features (None: any) beside the stack's frameworks."""
    entries = [entry for entry in ENTRIES if _concerns(entry, features)]
    job, plain, packages = plan.context(of, stack, features=features), of.reader(table), stack.frameworks()
    before = {entry.id: _decided(entry, plain, job) for entry in entries}
    defects = {entry.id: _plain(entry, before[entry.id]) for entry in entries}
    found, theirs = beside(packages, entries, of, plain, job)
    listed = [
        _advised(d, of, table, before[d.entry.id]) for d in (defects | theirs).values() if d is not None
    ]
    reaching = [defect.entry.id for defect in listed if defect.reaches]
    return Audit(of, packages, found, tuple(listed), tuple(_upgrades(reaching, entries, of, table)))


def beside(
    packages: Collection[Package], entries: Collection[Entry], of: Subject, plain: Reader, job: PatchContext
) -> tuple[tuple[MonkeyPatch, ...], dict[str, Defect]]:
    """The monkey patches of frameworks, and those of the entries that they have to do with, by id."""
    if of.root is None or not packages:
        return (), {}
    theirs, table = {}, plain.table
    megatron = plain.definitions or Definitions(SourceTree(of.root))
    found = frameworks.monkey_patches_of(packages, megatron, entries)
    always = frameworks.reader(megatron, table, (patch for patch in found if not patch.conditions))
    whenever = frameworks.reader(megatron, table, found)
    for entry in entries if found else ():
        touching = whenever.touching(entry)
        around = frameworks.wrapped(entry, found) if isinstance(entry, Patch) else ()
        first = _presence(_decided(entry, plain, job))
        surely = _presence(_decided(entry, always, job)) if always.touching(entry) else first
        at_most = _presence(_decided(entry, whenever, job)) if touching else first
        states = first, surely, at_most
        if defect := _beside(entry, states, touching, around):
            theirs[entry.id] = defect
    return found, theirs


def _concerns(entry: Entry, features: frozenset[str] | None) -> bool:
    """Whether a job with these features, on accelerators and their libraries' layers, meets the entry."""
    if set(entry.backends) <= set(LOCAL_LAYERS) or (isinstance(entry, Patch) and entry.opt_in):
        return False
    avoided = isinstance(entry, Trap) and features is not None and bool(entry.unless & features)
    return not avoided and (features is None or entry.when <= features)


def _decided(entry: Entry, reader: Reader, job: PatchContext) -> Decision | None:
    """What is decided about an entry by what can tell; None: a trap that is not there."""
    reading = reader.read(entry)
    if isinstance(entry, Patch):
        return deciding.decide(entry, reading, job)
    return deciding.decide_trap(entry, reading, job)


def _presence(decision: Decision | None) -> Presence:
    """Whether the defect is there; a patch that is skipped though it is there is not needed here."""
    if decision is None:
        return Presence.ABSENT  # a trap that is not met
    if decision.evidence is Presence.PRESENT:
        if decision.action is Action.SKIP:
            return Presence.ABSENT
        return Presence.UNKNOWN if decision.action is Action.OWNED else Presence.PRESENT
    return decision.evidence


def _plain(entry: Entry, decision: Decision | None) -> Defect | None:
    """The defect where no framework has to do with it."""
    presence = _presence(decision)
    if presence is Presence.ABSENT or decision is None:
        return None
    standing = Standing.PRESENT if presence is Presence.PRESENT else Standing.UNKNOWN
    reason = "" if standing is Standing.PRESENT else decision.reason
    reason = reason.removesuffix(f", or go on with --allow-drift {entry.id}")
    if isinstance(entry, Trap):
        reason = reason.removeprefix(f"{entry.why} {entry.instead} ")
    return Defect(entry=entry, standing=standing, reason=reason, proven=decision.proven)


def _beside(
    entry: Entry,
    states: tuple[Presence, Presence, Presence],
    touching: tuple[MonkeyPatch, ...],
    around: tuple[MonkeyPatch, ...],
) -> Defect | None:
    """The defect where a framework has to do with it; None where it changes nothing.

    `states` are without its monkey patches, with those that are always in place, and with all of them.
    """
    before, surely, at_most = states
    always = tuple(patch for patch in touching if not patch.conditions)

    def defect(standing: Standing, said: str, by: tuple[MonkeyPatch, ...]) -> Defect:
        return Defect(
            entry=entry, standing=standing, reason=f"{replaced_by(by)}{said}", proven=True, patched_by=by
        )

    if always and surely is not before:
        if surely is Presence.ABSENT:
            return defect(Standing.MENDED, ", whose code does not have it", always)
        if surely is Presence.PRESENT:
            return defect(Standing.PRESENT, ", whose own code has it", always)
        return defect(Standing.UNKNOWN, f", whose code is unfamiliar: {_UNSEEN}", always)
    if always and surely is Presence.PRESENT:
        return defect(Standing.PRESENT, ", and it is there all the same", always)
    if surely is Presence.ABSENT and at_most is Presence.ABSENT:
        return None
    if any(isinstance(entry, Patch) and frameworks.mends(entry, patch) for patch in around):
        return defect(Standing.MENDED, ", which was read and mends it", around)
    if surely is Presence.PRESENT and any(not patch.conditions for patch in around):
        return defect(Standing.UNKNOWN, f": {_UNSEEN}", around)
    if surely is not at_most:
        if at_most is Presence.ABSENT:
            return defect(
                Standing.CONDITIONAL, ", whose code does not have it; elsewhere it is there", touching
            )
        has = "whose own code has it" if at_most is Presence.PRESENT else "whose code is unfamiliar"
        standing = Standing.PRESENT if surely is Presence.PRESENT else Standing.UNKNOWN
        return defect(standing, f", {has}", touching)
    if surely is Presence.PRESENT and around:
        return defect(Standing.PRESENT, f": {_UNSEEN}", around)
    return None


def replaced_by(patches: tuple[MonkeyPatch, ...]) -> str:
    """Who replaces or wraps what, where and when."""
    said = [
        f"{p.framework} {'wraps' if p.wraps else 'replaces'} {p.name} ({p.place}, {p.when})" for p in patches
    ]
    return " and ".join(said)


def _advised(defect: Defect, of: Subject, table: Table, decision: Decision | None) -> Defect:
    """The defect with what can be done about it."""
    applies = decision is not None and decision.action is Action.APPLY and decision.proven
    return replace(
        defect,
        mended_in=_mended_in(defect.entry, of, table),
        applies=applies and isinstance(defect.entry, Patch) and not defect.patched_by,
    )


def _mended_in(entry: Entry, of: Subject, table: Table) -> str | None:
    """The first later minor from which on every reviewed release was read to be without the defect."""
    first = None
    for release in _later(of, table):
        if table.defect(entry.id, release) is not Presence.ABSENT:
            first = None
        else:
            first = first or release
    return ".".join(first.split(".")[:2]) if first else None


def _later(of: Subject, table: Table) -> list[str]:
    """The reviewed releases of later minors than this megatron's own, oldest first."""
    own = minor_version(of.version) if of.version else None
    releases = [reference for reference in table.references if "+" not in reference]
    return [release for release in releases if own and (minor_version(release) or own) > own]


def _upgrades(
    reaching: Collection[str], entries: Collection[Entry], of: Subject, table: Table
) -> Iterator[Upgrade]:
    """What later releases come to for the same job; nothing where it has nothing to gain."""
    newest = {minor_version(release): release for release in _later(of, table)}
    for release in newest.values() if reaching else ():
        there = [
            entry.id
            for entry in entries
            if entry.kind is DefectKind.SILENT and table.defect(entry.id, release) is Presence.PRESENT
        ]
        yield Upgrade(
            release,
            tuple(name for name in there if name in reaching),
            tuple(name for name in there if name not in reaching),
        )
