"""What was decided for each entry of the patch list, with the reason as it is printed."""

from dataclasses import dataclass
from enum import StrEnum

from bundle.patches.entry import Presence


class Action(StrEnum):
    """What to do about an entry; DRIFT and CONFLICT stop a job that needs the patch."""

    APPLY = "APPLY"
    SKIP = "SKIP"
    DRIFT = "DRIFT"
    CONFLICT = "CONFLICT"
    OWNED = "OWNED"
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
