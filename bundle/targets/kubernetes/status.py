"""Whether a workload has ended, and how, by its status."""

from collections.abc import Mapping
from typing import Any, NamedTuple

# What conditions are called by Jobs, JobSets, TrainJobs and AscendJobs.
_SUCCESS, _FAILURE = ("Complete", "Completed", "Succeeded"), "Failed"


class Ended(NamedTuple):
    """Whether it succeeded, None before it has ended; and what its controller says about that."""

    succeeded: bool | None
    reason: str = ""


def by_conditions(status: Mapping[str, Any]) -> Ended:
    """Of what has conditions, as most workloads have."""
    true = {each["type"]: each for each in status.get("conditions") or () if each.get("status") == "True"}
    if any(name in true for name in _SUCCESS):
        return Ended(True)
    if _FAILURE in true:
        return Ended(False, _reason(true[_FAILURE]))
    return Ended(None, _reason(true["Suspended"]) if "Suspended" in true else "")


def by_phase(status: Mapping[str, Any]) -> Ended:
    """Of a Job of Volcano, which has a phase."""
    state = status.get("state") or {}
    succeeded = {"Completed": True, "Failed": False, "Terminated": False, "Aborted": False}
    return Ended(succeeded.get(state.get("phase", "")), _reason(state))


def _reason(of: Mapping[str, Any]) -> str:
    return str(of.get("message") or of.get("reason") or "")
