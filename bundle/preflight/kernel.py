"""Failures of devices or memory in the kernel's log: `python -m bundle.preflight.kernel`."""

from bundle.environment import machine
from bundle.environment.machine import Machine
from bundle.launch.causes import KERNEL_RULES, RestartAction, find_cause
from bundle.preflight import ProbeResult

_KERNEL_LOG_COMMAND = ("dmesg",)
# The rules for which a launch excludes the node.
_NODE_EXCLUSION_RULES = tuple(rule for rule in KERNEL_RULES if rule.action is RestartAction.RESTART_WITHOUT)
_MAX_LISTED_FAILURES = 4


def probe(local_machine: Machine) -> ProbeResult:
    """Return the failures in the log since the machine started; most containers may not read the log."""
    log = local_machine.run(_KERNEL_LOG_COMMAND)
    if log.value is None:
        return ProbeResult(skipped=log.reason)
    lines = log.value.splitlines()
    causes: dict[str, str] = {}
    for line in lines:
        if hit := find_cause(_NODE_EXCLUSION_RULES, line):
            device = hit.match.groupdict().get("device")
            causes.setdefault(f"PCI {device}: {hit.cause}" if device else hit.cause, hit.line)
    descriptions = [f"{cause} ({line})" for cause, line in causes.items()]
    more = (
        [f"and {len(descriptions) - _MAX_LISTED_FAILURES} more"]
        if len(descriptions) > _MAX_LISTED_FAILURES
        else []
    )
    return ProbeResult({"lines": len(lines)}, "; ".join([*descriptions[:_MAX_LISTED_FAILURES], *more]))


if __name__ == "__main__":
    probe(machine.build_local_machine()).print_result()
