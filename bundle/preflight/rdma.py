"""Whether RDMA ports are up and can be used here: `python -m bundle.preflight.rdma`.

One that is down beside others may be meant to be; `doctor --compare` tells where only one node has it down.
"""

from bundle.environment import hardware, machine
from bundle.environment.machine import Machine
from bundle.preflight import Found

_PORTS = "/sys/class/infiniband"


def probe(here: Machine) -> Found:
    """How many ports there are, and which of them are up."""
    there = sum(len(here.names(f"{_PORTS}/{device}/ports")) for device in here.names(_PORTS))
    if not there:
        return Found(skipped=f"no port in {_PORTS}")
    usable = hardware.rdma(here)
    up = usable.value or ()
    measured = {"ports": there, "ports up": len(up)}
    return Found(measured, said=", ".join(up)) if up else Found(measured, usable.reason)


if __name__ == "__main__":
    probe(machine.local()).tell()
