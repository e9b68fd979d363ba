"""Whether a workload has ended, and how, by its status."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from bundle.errors import ExitCode

# What conditions are called by Jobs, JobSets, TrainJobs and AscendJobs.
_SUCCESS, _FAILURE = ("Complete", "Completed", "Succeeded"), "Failed"


class Ended(NamedTuple):
    """Whether it succeeded, None before it has ended; what its controller says about that.

    `code` is the job's own, where no pod ends with it.
    """

    succeeded: bool | None
    reason: str = ""
    code: int | None = None


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


def by_ray(status: Mapping[str, Any]) -> Ended:
    """Of a RayJob, whose status has Ray's own of its driver."""
    state, message = status.get("jobDeploymentStatus", ""), str(status.get("message") or "")
    if state not in ("Complete", "Failed", "ValidationFailed"):
        return Ended(None, state)
    if status.get("jobStatus") == "SUCCEEDED":
        return Ended(True)
    if status.get("jobStatus") == "STOPPED":
        return Ended(False, "stopped", int(ExitCode.TERMINATED))
    # Behind its first line stands the driver's log.
    reason, code = message.partition("\n")[0], re.search(r"failed with exit code (\d+)", message)
    return Ended(False, reason or str(status.get("reason") or ""), int(code[1]) if code else None)


def _reason(of: Mapping[str, Any]) -> str:
    return str(of.get("message") or of.get("reason") or "")
