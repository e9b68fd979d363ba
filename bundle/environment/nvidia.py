"""NVIDIA GPUs by nvidia-smi, or else by /proc/driver/nvidia, without NVML or CUDA."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from bundle.environment.machine import (
    MOST_DEVICES,
    MOST_DIGITS,
    NUMBER_PATTERN,
    Accelerator,
    DetectedValue,
    Machine,
    Selection,
    VendorDevices,
    find_weakest_link,
    format_short_assignment,
)

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
QUERY_FIELDS = ("index", "uuid", "name", "compute_cap", "memory.total", "driver_version", "mig.mode.current")
QUERY_COMMAND = ("nvidia-smi", f"--query-gpu={','.join(QUERY_FIELDS)}", "--format=csv,noheader,nounits")
TOPOLOGY_COMMAND = ("nvidia-smi", "topo", "-m")
MIG_LIST_COMMAND = ("nvidia-smi", "-L")

# The driver reads an index as strtol does: blanks, a sign, digits; whatever follows the digits is ignored.
_STRTOL_INDEX_PATTERN = r"[ \t\n\v\f\r]*([+-]?[0-9]+)"
_MIG_LINE = r"^\s+MIG (?P<profile>\S+)\s+Device\s+\d+:\s+\(UUID:\s*(?P<uuid>MIG-[^)\s]+)\)"


class _Gpu(NamedTuple):
    device: Accelerator
    driver: str | None
    has_mig: bool = False


def find(machine: Machine) -> VendorDevices:
    """Return the NVIDIA devices of a machine; `present` is 0 where there are none, with the reason."""
    answer = machine.run(QUERY_COMMAND)
    gpus = _from_query(answer) or _from_proc(machine, answer.reason)
    if not gpus:
        nodes = "no NVIDIA GPU was found, because no /dev/nvidia<N> exists"
        if _list_device_nodes(machine):
            nodes = "a /dev/nvidia<N> exists, but no NVIDIA driver was found"
        return _report_no_gpu(f"{nodes} ({answer.reason})")
    instances = _list_mig_instances(machine, gpus)
    names = [gpu.device.identity for gpu in gpus]
    selection = select_visible(
        machine.environ.get(VISIBLE_DEVICES), names, [instance.identity for instance in instances]
    )
    pool = instances or [gpu.device for gpu in gpus]
    devices = tuple(replace(pool[position], index=index) for index, position in enumerate(selection.chosen))
    return VendorDevices(
        backend="cuda",
        noun="GPU",
        present=len(gpus),
        devices=devices,
        reason=selection.reason,
        driver=_read_driver_version(machine, gpus),
        toolkit=DetectedValue(None, "CUDA's runtime comes with torch, not with the machine"),
        link=find_weakest_link(machine, TOPOLOGY_COMMAND, "GPU", [device.number for device in devices]),
        faults=(selection.fault,) if selection.fault else (),
        notes=_collect_notes(machine, gpus, instances),
    )


def _report_no_gpu(reason: str) -> VendorDevices:
    unknown: DetectedValue[str] = DetectedValue(None, "no NVIDIA GPU")
    return VendorDevices("cuda", "GPU", 0, (), reason, unknown, unknown, unknown)


def _from_query(answer: DetectedValue[str]) -> list[_Gpu]:
    gpus: list[_Gpu] = []
    for line in (answer.value or "").splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(QUERY_FIELDS) or not re.fullmatch(NUMBER_PATTERN, cells[0]):
            continue  # a warning line that a driver prints among the rows
        index, uuid, name, capability, memory, driver, mig = cells
        device = Accelerator(
            index=int(index),
            number=int(index),
            name=name,
            identity=uuid,
            memory=_parse_size(memory),
            generation=_parse_cell(capability, r"\d{1,3}\.\d{1,3}", "compute_cap"),
        )
        gpus.append(_Gpu(device, driver, mig == "Enabled"))
    return gpus[:MOST_DEVICES]


def _parse_size(mebibytes: str) -> DetectedValue[int]:
    cell = _parse_cell(mebibytes, NUMBER_PATTERN, "memory.total")
    return DetectedValue(None if cell.value is None else int(cell.value) * 2**20, cell.reason)


def _parse_cell(cell: str, pattern: str, column: str) -> DetectedValue[str]:
    """Return the cell if it matches the pattern; [N/A], [Unknown Error] and the like become the reason."""
    is_known = re.fullmatch(pattern, cell) is not None
    return DetectedValue(
        cell if is_known else None, f"nvidia-smi {column}" + ("" if is_known else f" says {cell!r}")
    )


def _from_proc(machine: Machine, reason: str) -> list[_Gpu]:
    """Return the GPUs of the driver's own files: names and UUIDs, without memory and compute capability."""
    base = "/proc/driver/nvidia/gpus"
    gpus: list[_Gpu] = []
    for bus in machine.list_names(base):
        text = machine.read(f"{base}/{bus}/information").value or ""
        rows = {
            key.strip(): value.strip()
            for key, _, value in (line.partition(":") for line in text.splitlines())
        }
        minor = rows.get("Device Minor", "")
        if f"nvidia{minor}" in _list_device_nodes(machine) and rows.get("GPU Excluded", "No") == "No":
            unknown: DetectedValue[int] = DetectedValue(None, reason)
            name, uuid = rows.get("Model", "NVIDIA GPU"), rows.get("GPU UUID", bus)
            gpus.append(
                _Gpu(Accelerator(0, len(gpus), name, uuid, unknown, DetectedValue(None, reason)), None)
            )
    return gpus[:MOST_DEVICES]


def _list_device_nodes(machine: Machine) -> list[str]:
    names = [name for name in machine.list_names("/dev") if re.fullmatch(rf"nvidia{NUMBER_PATTERN}", name)]
    return sorted(names, key=lambda name: int(name[len("nvidia") :]))


def _list_mig_instances(machine: Machine, gpus: list[_Gpu]) -> list[Accelerator]:
    if not any(gpu.has_mig for gpu in gpus):
        return []
    instances: list[Accelerator] = []
    parent = gpus[0].device
    by_number = {gpu.device.number: gpu.device for gpu in gpus}
    for line in (machine.run(MIG_LIST_COMMAND).value or "").splitlines():
        if match := re.match(rf"GPU ({NUMBER_PATTERN}):", line):
            parent = by_number.get(int(match[1]), parent)
        elif match := re.match(_MIG_LINE, line):
            profile = match["profile"]
            size = re.search(rf"({NUMBER_PATTERN})gb", profile)
            memory = DetectedValue(
                int(size[1]) * 10**9 if size else None, f"the MIG profile's name, {profile}"
            )
            name = f"{parent.name} MIG {profile}"
            instances.append(replace(parent, name=name, identity=match["uuid"], memory=memory))
    return instances[:MOST_DEVICES]


def _read_driver_version(machine: Machine, gpus: list[_Gpu]) -> DetectedValue[str]:
    if gpus[0].driver:
        return DetectedValue(gpus[0].driver, "nvidia-smi driver_version")
    version = machine.read("/proc/driver/nvidia/version")
    match = re.search(r"Kernel Module\D*?(?:for \S+)?\s+(\d+(?:\.\d+)+)", version.value or "")
    return DetectedValue(match[1] if match else None, version.reason)


def _collect_notes(machine: Machine, gpus: list[_Gpu], instances: list[Accelerator]) -> tuple[str, ...]:
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


def select_visible(value: str | None, uuids: Sequence[str], instances: Sequence[str] = ()) -> Selection:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, as positions in `uuids` (with MIG: in `instances`).

    Measured with cuInit and cuDeviceGetUuid on driver 580.159.04. The CUDA programming guide, 5.2.1.1, agrees
    where it covers the case.

    The order is honoured, and the list is cut at the first entry that names no device. The first entry
    decides whether entries are indices or UUID prefixes. A device named twice makes the driver refuse to
    start.
    """
    if instances:
        return _select_mig_instance(value, instances)
    if value is None:
        return Selection(
            tuple(range(len(uuids))), f"{VISIBLE_DEVICES} is not set: all {len(uuids)} are visible"
        )
    entries = value.split(",")
    is_uuid_list = entries[0].startswith("GPU-")
    chosen: list[int] = []
    for entry in entries:
        position = _find_by_prefix(entry, uuids) if is_uuid_list else _find_by_index(entry, len(uuids))
        if position is None or len(chosen) > len(uuids):
            break
        chosen.append(position)
    shown = format_short_assignment(VISIBLE_DEVICES, value)
    if len(set(chosen)) < len(chosen):
        return Selection(
            (), shown, f"{shown} names a device twice: CUDA refuses to start. Name each device once."
        )
    return Selection.from_list(shown, entries, chosen, "names no device here")


def _find_by_index(entry: str, count: int) -> int | None:
    match = re.match(_STRTOL_INDEX_PATTERN, entry)
    if match is None or len(match[1]) > MOST_DIGITS or not 0 <= int(match[1]) < count:
        return None
    return int(match[1])


def _find_by_prefix(entry: str, names: Sequence[str]) -> int | None:
    """Return the position of the one name that begins with `entry`.

    Blanks are ignored after a whole UUID, and only there.
    """
    entry = entry.rstrip() if entry.rstrip() in names else entry
    matches = [position for position, name in enumerate(names) if entry and name.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _select_mig_instance(value: str | None, instances: Sequence[str]) -> Selection:
    """Return the selection of one MIG instance.

    CUDA never shows a process more than one, nor a GPU beside it (MIG user guide).
    """
    rule = "with MIG a process sees one instance only"
    if value is None:
        return Selection((0,), f"{rule}: the first of {len(instances)}")
    first = value.split(",")[0]
    position = _find_by_prefix(first, instances) if first.startswith("MIG-") else _find_by_index(first, 1)
    if position is None:
        return Selection(
            (),
            f"{format_short_assignment(VISIBLE_DEVICES, value)}: {first[:80]!r} names no MIG instance here",
        )
    return Selection((position,), f"{format_short_assignment(VISIBLE_DEVICES, value)}: {rule}")
