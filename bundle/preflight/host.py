"""The free memory of the host: `python -m bundle.preflight.host`."""

import re

from bundle.environment import hardware, machine
from bundle.environment.machine import NUMBER_PATTERN, Machine
from bundle.preflight import ProbeResult

_LEAST_FREE_MEMORY_SHARE = 0.1


def probe(local_machine: Machine) -> ProbeResult:
    """Return the memory that a process can get without swapping [GiB].

    The probe fails where less than `_LEAST_FREE_MEMORY_SHARE` of the memory for this process is free.
    """
    memory = hardware.read_host_limits(local_machine).memory
    meminfo = local_machine.read("/proc/meminfo")
    match = re.search(rf"^MemAvailable:\s*({NUMBER_PATTERN}) kB", meminfo.value or "", re.MULTILINE)
    if match is None or memory.value is None:
        return ProbeResult(skipped=f"unknown: {meminfo.reason}, {memory.reason}")
    free = min(int(match[1]) * 1024, memory.value)
    measured = {"GiB free": free / 2**30}
    if free < _LEAST_FREE_MEMORY_SHARE * memory.value:
        return ProbeResult(measured, f"only {free / 2**30:.1f} of {memory.value / 2**30:.1f} GiB are free")
    return ProbeResult(measured)


if __name__ == "__main__":
    probe(machine.build_local_machine()).print_result()
