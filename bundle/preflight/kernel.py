"""Whether the kernel has logged that a device or memory failed: `python -m bundle.preflight.kernel`."""

from bundle.environment import machine
from bundle.environment.machine import Machine
from bundle.launch.causes import KERNEL, Action, found
from bundle.preflight import Found

_COMMAND = ("dmesg",)
# What a launch would leave the node out for.
_RULES = tuple(rule for rule in KERNEL if rule.action is Action.RESTART_WITHOUT)
_SHOWN = 4


def probe(here: Machine) -> Found:
    """What the log says since the machine was started; most containers may not read it."""
    log = here.run(_COMMAND)
    if log.value is None:
        return Found(skipped=log.reason)
    lines = log.value.splitlines()
    causes: dict[str, str] = {}
    for line in lines:
        if hit := found(_RULES, line):
            device = hit.match.groupdict().get("device")
            causes.setdefault(f"PCI {device}: {hit.says}" if device else hit.says, hit.line)
    told = [f"{cause} ({line})" for cause, line in causes.items()]
    more = [f"and {len(told) - _SHOWN} more"] if len(told) > _SHOWN else []
    return Found({"lines": len(lines)}, "; ".join([*told[:_SHOWN], *more]))


if __name__ == "__main__":
    probe(machine.local()).tell()
