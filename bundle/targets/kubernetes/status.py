"""The outcome of a workload, read from its status."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from bundle.errors import ExitCode

# The names of conditions in Jobs, JobSets, TrainJobs and AscendJobs.
_SUCCESS, _FAILURE = ("Complete", "Completed", "Succeeded"), "Failed"


class WorkloadOutcome(NamedTuple):
    """The outcome of a workload: `succeeded` is None before the end; `reason` is its controller's message.

    `code` is the job's exit code where no pod ends with it.
    """

    succeeded: bool | None
    reason: str = ""
    code: int | None = None


def read_conditions(status: Mapping[str, Any]) -> WorkloadOutcome:
    """Return the outcome in a status with conditions, which most workloads have."""
    true_conditions = {
        condition["type"]: condition
        for condition in status.get("conditions") or ()
        if condition.get("status") == "True"
    }
    if any(name in true_conditions for name in _SUCCESS):
        return WorkloadOutcome(True)
    if _FAILURE in true_conditions:
        return WorkloadOutcome(False, _read_message_or_reason(true_conditions[_FAILURE]))
    return WorkloadOutcome(
        None, _read_message_or_reason(true_conditions["Suspended"]) if "Suspended" in true_conditions else ""
    )


def read_volcano_phase(status: Mapping[str, Any]) -> WorkloadOutcome:
    """Return the outcome in the status of a Volcano Job, which has a phase."""
    state = status.get("state") or {}
    succeeded = {"Completed": True, "Failed": False, "Terminated": False, "Aborted": False}
    return WorkloadOutcome(succeeded.get(state.get("phase", "")), _read_message_or_reason(state))


def read_ray_status(status: Mapping[str, Any]) -> WorkloadOutcome:
    """Return the outcome in the status of a RayJob, which contains Ray's status of the driver."""
    state, message = status.get("jobDeploymentStatus", ""), str(status.get("message") or "")
    if state not in ("Complete", "Failed", "ValidationFailed"):
        return WorkloadOutcome(None, state)
    if status.get("jobStatus") == "SUCCEEDED":
        return WorkloadOutcome(True)
    if status.get("jobStatus") == "STOPPED":
        return WorkloadOutcome(False, "stopped", int(ExitCode.TERMINATED))
    # The driver's log follows the first line.
    reason, code = message.partition("\n")[0], re.search(r"failed with exit code (\d+)", message)
    return WorkloadOutcome(False, reason or str(status.get("reason") or ""), int(code[1]) if code else None)


def _read_message_or_reason(status: Mapping[str, Any]) -> str:
    return str(status.get("message") or status.get("reason") or "")
