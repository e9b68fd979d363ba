"""The patch list: patches, and the seams, traps and facades beside them; and what is decided about each."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from bundle.environment import BACKENDS
from bundle.patches.definitions import Evidence

NOTHING = "nothing"  # Patch.assumes of a patch that is right whatever its caller does
# Features that no recipe has: what the engine does itself, and megatron in the jobs of others.
MEGATRONS_BALANCING, MEGATRONS_MTP_LOSS = "megatron-balancing", "megatron-mtp-loss"
MEGATRONS_TIED_HEAD = "megatron-tied-head"
LEFT_TO_MEGATRON = frozenset({MEGATRONS_BALANCING, MEGATRONS_MTP_LOSS, MEGATRONS_TIED_HEAD})


class Presence(StrEnum):
    """What reading the source says about a defect; UNKNOWN when the code looks like neither state."""

    PRESENT = "present"
    ABSENT = "absent"
    UNKNOWN = "unknown"

    @classmethod
    def of(cls, present: bool) -> "Presence":
        """PRESENT or ABSENT, for a question that has an answer."""
        return cls.PRESENT if present else cls.ABSENT

    @classmethod
    def told(cls, present: object = False, absent: object = False) -> "Presence":
        """PRESENT where the wrong code was recognised, else ABSENT where the right one was, else UNKNOWN."""
        return cls.PRESENT if present else cls.ABSENT if absent else cls.UNKNOWN


class Defect(NamedTuple):
    """Whether a source has a defect: a question, and the definitions that its answer is read in."""

    evidence: tuple[str, ...]
    answer: Callable[[Evidence], Presence]

    def __call__(self, source: Evidence) -> Presence:
        """What the source says. Raises source.Unreadable."""
        return self.answer(source)


def asks(*evidence: str) -> Callable[[Callable[[Evidence], Presence]], Defect]:
    """Makes a Defect of a function of the source."""
    return lambda answer: Defect(evidence, answer)


def reads(*needed: str, also: tuple[str, ...] = ()) -> Callable[[Callable[..., Presence]], Defect]:
    """Makes a Defect of a function of definitions: of those that it needs, and of others or None.

    Where one that it needs is not there, nobody knows.
    """

    def defect(function: Callable[..., Presence]) -> Defect:
        def answer(source: Evidence) -> Presence:
            found = [source[target] for target in needed]
            if None in found:
                return Presence.UNKNOWN
            return function(*found, *(source[target] for target in also))

        return Defect((*needed, *also), answer)

    return defect


class Replacement(NamedTuple):
    """One attribute of megatron and the function that makes its replacement.

    `target` is "package.module:Qualified.name"; naming a re-export replaces that one namespace only.
    `function` is the "area:name" of a function in bundle.wrappers, called as `name(original) -> replacement`.
    """

    target: str
    function: str
    optional: bool = False  # some of the releases do not have this target: replaced where it is
    exclusive: bool = False  # does not call the original: no other patch may stand on the target
    by_signature: bool = False  # reviewed by parameters and decorators, see `called`

    @property
    def wrapper(self) -> str:
        """The function as "package.module:name"."""
        return f"bundle.wrappers.{self.function}"


def called(target: str, function: str, *, optional: bool = False, exclusive: bool = False) -> Replacement:
    """A replacement that depends on how its target is called, and not on what the body does."""
    return Replacement(target, function, optional, exclusive, by_signature=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """A defect of megatron-core and what mends it from outside.

    The fingerprints that were reviewed are in releases.json, under the targets' names: the releases in
    which `defect` is present are the ones whose targets the wrappers were read and proven against.
    """

    id: str
    replacements: tuple[Replacement, ...]
    why: str  # what goes wrong without it, as the user would see it
    upstream: str  # where upstream knows of it, or how it was found
    range: str  # PEP 508 on the base version of megatron-core; "" is every release
    defect: Defect  # read where the defect is, which need not be in the targets
    silent: bool  # nothing tells of it: no error and no hang, but other numbers, or code of others that runs
    # of its caller: what the loss function returns, how labels are given, what is summed over which ranks
    assumes: str = ""
    when: frozenset[str] = frozenset()  # features of the recipe, all of them
    backends: tuple[str, ...] = BACKENDS
    requires: tuple[tuple[str, str], ...] = ()  # other packages and their ranges: ("torch", ">=2.8")
    fixed_in: str | None = None  # the first release without the defect
    opt_in: bool = False  # an improvement: applied only when it is asked for by id

    @property
    def evidence(self) -> tuple[str, ...]:
        """The definitions that decide whether the defect is there."""
        return self.defect.evidence


@dataclass(frozen=True, kw_only=True, slots=True)
class Seam:
    """A private upstream name that the bundle relies on without replacing it."""

    id: str
    targets: tuple[str, ...]
    use: str  # what is done with it, and by which room
    why: str
    when: frozenset[str] = frozenset()
    range: str = ""  # the releases that have it
    by_signature: bool = False  # reviewed as a Replacement's target is


@dataclass(frozen=True, kw_only=True, slots=True)
class Trap:
    """A defect with no narrow fix: the recipes that meet it are refused."""

    id: str
    range: str  # PEP 508 on the base version of megatron-core; asked only where no source answers
    defect: Defect
    when: frozenset[str]  # features of the recipe, all of them
    why: str  # what goes wrong
    cause: str  # the upstream line, or how it was bisected
    silent: bool  # as a patch's
    instead: str  # what to change
    backends: tuple[str, ...] = BACKENDS
    unless: frozenset[str] = frozenset()  # features of which any one avoids it
    unshown: str = ""  # what showing it would take, where no test does

    @property
    def evidence(self) -> tuple[str, ...]:
        """The definitions that decide whether the defect is there."""
        return self.defect.evidence


class Action(StrEnum):
    """What to do about an entry; DRIFT and CONFLICT stop a job that needs the patch.

    UNVOUCHED is a patch that is left out since nobody says that its caller is what it assumes.
    """

    APPLY = "APPLY"
    SKIP = "SKIP"
    DRIFT = "DRIFT"
    CONFLICT = "CONFLICT"
    OWNED = "OWNED"
    UNVOUCHED = "UNVOUCHED"
    TRAP = "TRAP"


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The decision about one entry: `proven` is False where only a version number spoke."""

    id: str
    action: Action
    reason: str
    range: str
    evidence: Presence
    proven: bool
    targets: tuple[str, ...] = ()
    fingerprints: tuple[str, ...] = ()  # of those targets that are there, in their order
    assumes: str = ""  # what the patch takes for granted of its caller
    stops: bool = False  # the job needs this and cannot have it

    @property
    def problem(self) -> str:
        """What stops a job, in a line: a trap is the recipe's, all else the patch's."""
        return f"{self.id}: {self.reason if self.action is Action.TRAP else f'{self.action}: {self.reason}'}"
