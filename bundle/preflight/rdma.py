"""The state of RDMA ports: `python -m bundle.preflight.rdma`.

A port that is down beside others may be down by intent.
"""

from bundle.environment import hardware, machine
from bundle.environment.machine import Machine
from bundle.preflight import ProbeResult

_DEVICES_DIRECTORY = "/sys/class/infiniband"


def probe(local_machine: Machine) -> ProbeResult:
    """Return the number of ports, and the ports that are up."""
    port_count = sum(
        len(local_machine.list_names(f"{_DEVICES_DIRECTORY}/{device}/ports"))
        for device in local_machine.list_names(_DEVICES_DIRECTORY)
    )
    if not port_count:
        return ProbeResult(skipped=f"no port in {_DEVICES_DIRECTORY}")
    usable = hardware.find_rdma_ports(local_machine)
    up = usable.value or ()
    measured = {"ports": port_count, "ports up": len(up)}
    return ProbeResult(measured, note=", ".join(up)) if up else ProbeResult(measured, usable.reason)


if __name__ == "__main__":
    probe(machine.build_local_machine()).print_result()
