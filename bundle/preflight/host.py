"""Whether the host's memory is free: `python -m bundle.preflight.host`."""

import re

from bundle.environment import hardware, machine
from bundle.environment.machine import NUMBER, Machine
from bundle.preflight import Found

_LEAST_FREE = 0.1


def probe(here: Machine) -> Found:
    """What a process could get without swapping, of what this one may use at all."""
    whole = hardware.host(here).memory
    said = here.read("/proc/meminfo")
    match = re.search(rf"^MemAvailable:\s*({NUMBER}) kB", said.value or "", re.MULTILINE)
    if match is None or whole.value is None:
        return Found(skipped=f"unknown: {said.reason}, {whole.reason}")
    free = min(int(match[1]) * 1024, whole.value)
    measured = {"GiB free": free / 2**30}
    if free < _LEAST_FREE * whole.value:
        return Found(measured, f"only {free / 2**30:.1f} of {whole.value / 2**30:.1f} GiB are free")
    return Found(measured)


if __name__ == "__main__":
    probe(machine.local()).tell()
