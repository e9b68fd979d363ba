"""What the runs of a check say about a patch."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from bundle.verification.check import Check, Gap, Raises


class Status(StrEnum):
    """The three answers of a check."""

    PROVEN = "proven"
    NOT_PROVABLE = "not provable here"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Observation:
    """What one rank saw: a distance, an exception, or why this machine cannot tell."""

    gap: float | None = None
    raised: str | None = None  # the exception's types, its own first: "UsageError BundleError Exception"
    message: str = ""
    unprovable: str | None = None

    def __str__(self) -> str:
        if self.unprovable is not None:
            return self.unprovable
        return f"gap {self.gap:.1e}" if self.raised is None else f"{self.raised.split()[0]}: {self.message}"


@dataclass(frozen=True, slots=True)
class Result:
    """The answer about one patch, with what was seen as the reason."""

    patch: str
    status: Status
    reason: str

    def as_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return {"id": self.patch, "status": str(self.status), "reason": self.reason}


def judge(patch: str, check: Check, without: Sequence[Observation], with_it: Sequence[Observation]) -> Result:
    """The result of a check from what its ranks saw in the run without the patch and in the one with it."""
    reasons = [seen.unprovable for seen in (*without, *with_it) if seen.unprovable is not None]
    if reasons:
        return Result(patch, Status.NOT_PROVABLE, reasons[0])
    # One rank that fails as expected is enough: the others may only see that it is gone.
    expected = any(matches(failure, seen) for failure in check.without for seen in without)
    agrees = all(seen.gap is not None and seen.gap <= check.agreement for seen in with_it)
    reason = f"without it: {_shown(without)}; with it: {_shown(with_it)}"
    if expected and agrees:
        return Result(patch, Status.PROVEN, reason)
    wanted = " or ".join(_described(failure) for failure in check.without)
    wrong = [] if expected else [f"without it there should be {wanted}"]
    wrong += [] if agrees else [f"with it the gap should be at most {check.agreement:g}"]
    return Result(patch, Status.FAILED, f"{reason} ({'; '.join(wrong)})")


def matches(failure: Raises | Gap, seen: Observation) -> bool:
    """Whether a rank saw this failure."""
    if isinstance(failure, Gap):
        # A run that became infinite or not a number has left the reference too.
        return seen.gap is not None and not seen.gap < failure.at_least
    return seen.raised is not None and failure.type in seen.raised.split() and failure.text in seen.message


def _shown(seen: Sequence[Observation]) -> str:
    return " | ".join(dict.fromkeys(map(str, seen)))


def _described(failure: Raises | Gap) -> str:
    if isinstance(failure, Gap):
        return f"a gap of at least {failure.at_least:g}"
    return f"{failure.type}: {failure.text}"
