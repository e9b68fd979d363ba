"""NVIDIA GPUs as nvidia-smi, /proc/driver/nvidia and the device nodes tell them, without NVML or CUDA."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from bundle.environment.machine import (
    MOST_DEVICES,
    MOST_DIGITS,
    NUMBER,
    Device,
    Fact,
    Machine,
    Selection,
    VendorDevices,
    assignment,
    weakest,
)

VISIBLE = "CUDA_VISIBLE_DEVICES"
FIELDS = ("index", "uuid", "name", "compute_cap", "memory.total", "driver_version", "mig.mode.current")
QUERY = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
TOPOLOGY = ("nvidia-smi", "topo", "-m")
LIST = ("nvidia-smi", "-L")

# The driver reads an index as strtol does: blanks, a sign, digits; whatever follows the digits is ignored.
_LEADING_INTEGER = r"[ \t\n\v\f\r]*([+-]?[0-9]+)"
_MIG_LINE = r"^\s+MIG (?P<profile>\S+)\s+Device\s+\d+:\s+\(UUID:\s*(?P<uuid>MIG-[^)\s]+)\)"


class _Gpu(NamedTuple):
    device: Device
    driver: str | None
    mig: bool = False


def find(machine: Machine) -> VendorDevices:
    """The NVIDIA side of a machine; `present` is 0 where there is none, with the reason."""
    answer = machine.run(QUERY)
    gpus = _from_query(answer) or _from_proc(machine, answer.reason) or _from_nodes(machine, answer.reason)
    if not gpus:
        nodes = "no /dev/nvidia<N>" if not _nodes(machine) else "device nodes without a driver"
        return _nothing(f"{nodes}; {answer.reason}")
    instances = _mig_instances(machine, gpus)
    names = [gpu.device.identity for gpu in gpus]
    selection = visible(machine.environ.get(VISIBLE), names, [instance.identity for instance in instances])
    pool = instances or [gpu.device for gpu in gpus]
    devices = tuple(replace(pool[at], index=index) for index, at in enumerate(selection.chosen))
    return VendorDevices(
        backend="cuda",
        noun="GPU",
        present=len(gpus),
        devices=devices,
        reason=selection.reason,
        driver=_driver(machine, gpus),
        toolkit=Fact(None, "CUDA's runtime comes with torch, not with the machine"),
        link=weakest(machine, TOPOLOGY, "GPU", [device.number for device in devices]),
        faults=(selection.fault,) if selection.fault else (),
        notes=_notes(machine, gpus, instances),
    )


def _nothing(reason: str) -> VendorDevices:
    unknown: Fact[str] = Fact(None, "no NVIDIA GPU")
    return VendorDevices("cuda", "GPU", 0, (), reason, unknown, unknown, unknown)


def _from_query(answer: Fact[str]) -> list[_Gpu]:
    gpus: list[_Gpu] = []
    for line in (answer.value or "").splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(FIELDS) or not re.fullmatch(NUMBER, cells[0]):
            continue  # a warning line that a driver prints among the rows
        index, uuid, name, capability, memory, driver, mig = cells
        device = Device(
            index=int(index),
            number=int(index),
            name=name,
            identity=uuid,
            memory=_size(memory),
            generation=_said(capability, r"\d{1,3}\.\d{1,3}", "compute_cap"),
        )
        gpus.append(_Gpu(device, driver, mig == "Enabled"))
    return gpus[:MOST_DEVICES]


def _size(mebibytes: str) -> Fact[int]:
    said = _said(mebibytes, NUMBER, "memory.total")
    return Fact(None if said.value is None else int(said.value) * 2**20, said.reason)


def _said(cell: str, pattern: str, column: str) -> Fact[str]:
    """The cell if it looks as it should; [N/A], [Unknown Error] and the like become the reason."""
    known = re.fullmatch(pattern, cell) is not None
    return Fact(cell if known else None, f"nvidia-smi {column}" + ("" if known else f" says {cell!r}"))


def _from_proc(machine: Machine, why: str) -> list[_Gpu]:
    """GPUs from the driver's own files: names and UUIDs, but neither memory nor compute capability."""
    base = "/proc/driver/nvidia/gpus"
    gpus: list[_Gpu] = []
    for bus in machine.names(base):
        text = machine.read(f"{base}/{bus}/information").value or ""
        rows = {
            key.strip(): value.strip()
            for key, _, value in (line.partition(":") for line in text.splitlines())
        }
        minor = rows.get("Device Minor", "")
        if f"nvidia{minor}" in _nodes(machine) and rows.get("GPU Excluded", "No") == "No":
            unknown: Fact[int] = Fact(None, why)
            name, uuid = rows.get("Model", "NVIDIA GPU"), rows.get("GPU UUID", bus)
            gpus.append(_Gpu(Device(0, len(gpus), name, uuid, unknown, Fact(None, why)), None))
    return gpus[:MOST_DEVICES]


def _from_nodes(machine: Machine, why: str) -> list[_Gpu]:
    """GPUs of which only the device node is known; used where the driver itself is there."""
    if machine.read("/proc/driver/nvidia/version").value is None:
        return []
    return [
        _Gpu(Device(0, number, "NVIDIA GPU", f"/dev/{node}", Fact(None, why), Fact(None, why)), None)
        for number, node in enumerate(_nodes(machine)[:MOST_DEVICES])
    ]


def _nodes(machine: Machine) -> list[str]:
    found = [name for name in machine.names("/dev") if re.fullmatch(rf"nvidia{NUMBER}", name)]
    return sorted(found, key=lambda name: int(name[len("nvidia") :]))


def _mig_instances(machine: Machine, gpus: list[_Gpu]) -> list[Device]:
    if not any(gpu.mig for gpu in gpus):
        return []
    instances: list[Device] = []
    parent = gpus[0].device
    numbered = {gpu.device.number: gpu.device for gpu in gpus}
    for line in (machine.run(LIST).value or "").splitlines():
        if match := re.match(rf"GPU ({NUMBER}):", line):
            parent = numbered.get(int(match[1]), parent)
        elif match := re.match(_MIG_LINE, line):
            profile = match["profile"]
            size = re.search(rf"({NUMBER})gb", profile)
            memory = Fact(int(size[1]) * 10**9 if size else None, f"the MIG profile's name, {profile}")
            name = f"{parent.name} MIG {profile}"
            instances.append(replace(parent, name=name, identity=match["uuid"], memory=memory))
    return instances[:MOST_DEVICES]


def _driver(machine: Machine, gpus: list[_Gpu]) -> Fact[str]:
    if gpus[0].driver:
        return Fact(gpus[0].driver, "nvidia-smi driver_version")
    version = machine.read("/proc/driver/nvidia/version")
    match = re.search(r"Kernel Module\D*?(?:for \S+)?\s+(\d+(?:\.\d+)+)", version.value or "")
    return Fact(match[1] if match else None, version.reason)


def _notes(machine: Machine, gpus: list[_Gpu], instances: list[Device]) -> tuple[str, ...]:
    notes = []
    if instances:
        notes.append(
            "MIG is on: a process sees one instance, and NCCL cannot join instances: one device per job"
        )
    order = machine.environ.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    if len({gpu.device.name for gpu in gpus}) > 1 and order != "PCI_BUS_ID":
        notes.append(
            "different GPUs, and CUDA_DEVICE_ORDER is not PCI_BUS_ID: CUDA does not number them as nvidia-smi"
        )
    return tuple(notes)


def visible(value: str | None, uuids: Sequence[str], instances: Sequence[str] = ()) -> Selection:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, as positions in `uuids` (with MIG: in `instances`).

    Measured with cuInit and cuDeviceGetUuid on driver 580.159.04 (the CUDA programming guide, 5.2.1.1, says
    the same where it says anything).

    Order is honoured and the list is cut at the first entry that names no device. The first entry decides
    whether entries are indices or UUID prefixes. A device named twice makes the driver refuse to start.
    """
    if instances:
        return _mig(value, instances)
    if value is None:
        return Selection(tuple(range(len(uuids))), f"{VISIBLE} is not set: all {len(uuids)} are visible")
    entries = value.split(",")
    by_uuid = entries[0].startswith("GPU-")
    chosen: list[int] = []
    for entry in entries:
        position = _by_prefix(entry, uuids) if by_uuid else _by_index(entry, len(uuids))
        if position is None or len(chosen) > len(uuids):
            break
        chosen.append(position)
    shown = assignment(VISIBLE, value)
    if len(set(chosen)) < len(chosen):
        return Selection(
            (), shown, f"{shown} names a device twice: CUDA refuses to start. Name each device once."
        )
    return Selection.of_list(shown, entries, chosen, "names no device here")


def _by_index(entry: str, count: int) -> int | None:
    match = re.match(_LEADING_INTEGER, entry)
    if match is None or len(match[1]) > MOST_DIGITS or not 0 <= int(match[1]) < count:
        return None
    return int(match[1])


def _by_prefix(entry: str, names: Sequence[str]) -> int | None:
    """The one name that begins with `entry`; blanks are ignored after a whole UUID, and only there."""
    entry = entry.rstrip() if entry.rstrip() in names else entry
    matches = [position for position, name in enumerate(names) if entry and name.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _mig(value: str | None, instances: Sequence[str]) -> Selection:
    """One MIG instance: CUDA never shows a process more than one, nor a GPU beside it (MIG user guide)."""
    rule = "with MIG a process sees one instance only"
    if value is None:
        return Selection((0,), f"{rule}: the first of {len(instances)}")
    first = value.split(",")[0]
    position = _by_prefix(first, instances) if first.startswith("MIG-") else _by_index(first, 1)
    if position is None:
        return Selection((), f"{assignment(VISIBLE, value)}: {first[:80]!r} names no MIG instance here")
    return Selection((position,), f"{assignment(VISIBLE, value)}: {rule}")
