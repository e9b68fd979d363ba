"""Ascend NPUs as the device nodes, npu-smi and CANN's own files tell them, without torch-npu.

The nodes /dev/davinci<N> are the evidence: ASCEND_VISIBLE_DEVICES is only a request to the container runtime,
and npu-smi lists dies that are not mounted (Ascend Docker Runtime documentation, soft partitioning on A3).
"""

import re
from dataclasses import replace
from itertools import pairwise
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

VISIBLE_DEVICES = "ASCEND_RT_VISIBLE_DEVICES"
INFO_COMMAND = ("npu-smi", "info")
LIST_COMMAND = ("npu-smi", "info", "-l")
TOPOLOGY_COMMAND = ("npu-smi", "info", "-t", "topo")

DRIVER_FILE = "/usr/local/Ascend/driver/version.info"
TOOLKIT_DIRECTORIES = ("/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest")

_MEMORY_USAGE_PATTERN = rf"({NUMBER_PATTERN})\s*/\s*({NUMBER_PATTERN})"


class TableRow(NamedTuple):
    """One device of the table.

    `number` is the Phy-ID (or Device); it is None where that column is absent or says NA.
    """

    npu: int
    chip: int
    number: int | None
    name: str
    health: str
    bus: str
    memory: int | None  # MiB


def find(machine: Machine) -> VendorDevices:
    """Return the Ascend devices of a machine; `present` is 0 where there are none, with the reason."""
    numbers = sorted(
        int(match[1])
        for name in machine.list_names("/dev")
        if (match := re.fullmatch(rf"davinci({NUMBER_PATTERN})", name))
    )[:MOST_DEVICES]
    if not numbers:
        unknown: DetectedValue[str] = DetectedValue(None, "no Ascend NPU")
        reason = "no Ascend NPU was found, because no /dev/davinci<N> exists"
        return VendorDevices("ascend", "NPU", 0, (), reason, unknown, unknown, unknown)
    answer = machine.run(INFO_COMMAND)
    rows = parse_npu_smi_table(answer.value or "")
    generation = _find_generation(machine, rows, answer.reason)
    pool = [
        _build_device(position, number, rows, generation, answer.reason)
        for position, number in enumerate(numbers)
    ]
    selection = select_visible(machine.environ.get(VISIBLE_DEVICES), len(pool))
    devices = tuple(replace(pool[position], index=index) for index, position in enumerate(selection.chosen))
    return VendorDevices(
        backend="ascend",
        noun="NPU",
        present=len(pool),
        devices=devices,
        reason=selection.reason,
        driver=_read_driver_file_or_header(machine, answer),
        toolkit=read_cann_version(machine),
        link=find_weakest_link(machine, TOPOLOGY_COMMAND, "NPU", [device.number for device in devices]),
        faults=(selection.fault,) if selection.fault else (),
        notes=_collect_notes(machine, rows, numbers),
    )


def _build_device(
    position: int, number: int, rows: tuple[TableRow, ...], generation: DetectedValue[str], reason: str
) -> Accelerator:
    # Phy-ID is the node's number. Where it is not printed, one chip per NPU id makes the NPU id the number.
    matches = [row for row in rows if (row.npu if row.number is None else row.number) == number]
    row = matches[0] if matches else (rows[position] if position < len(rows) else None)
    if row is None:
        return Accelerator(
            position, number, "Ascend NPU", f"/dev/davinci{number}", DetectedValue(None, reason), generation
        )
    memory = DetectedValue(row.memory * 2**20 if row.memory else None, "`npu-smi info`, the memory column")
    return Accelerator(position, number, row.name, row.bus, memory, generation)


def parse_generation(name: str) -> str | None:
    """Return a1, a2, a3, a5 or 310 for the name of a SoC; None where the name is unknown.

    Source: torch-npu's NpuVariables.cpp.
    """
    for pattern, generation in (
        (r"910B\d.*", "a2"),
        (r"910_93\d\d", "a3"),
        (r"95\d.*|910_95.*", "a5"),
        (r"310.*", "310"),
        (r"910(A|B|Pro[AB])", "a1"),
    ):
        if re.fullmatch(pattern, name.removeprefix("Ascend")):
            return generation
    return None


def _find_generation(machine: Machine, rows: tuple[TableRow, ...], unknown_reason: str) -> DetectedValue[str]:
    """Return a1, a2, a3, a5 or 310 by the name that npu-smi prints.

    SoC names are those of torch_npu's NpuVariables.cpp.
    """
    if not rows:
        return DetectedValue(None, unknown_reason)
    name = rows[0].name.removeprefix("Ascend")
    reason = f"npu-smi names it {rows[0].name}"
    if (parsed_generation := parse_generation(name)) is not None:
        return DetectedValue(parsed_generation, reason)
    if name == "910" and any(row.chip == 1 for row in rows):
        return DetectedValue("a3", f"{reason}, with two chips per NPU id")
    if name == "910":
        chip_counts = machine.run(LIST_COMMAND)
        counts = re.findall(rf"Chip Count\s*:\s*({NUMBER_PATTERN})", chip_counts.value or "")
        if counts:
            return DetectedValue(
                "a3" if "2" in counts else None,
                f"{reason}; {chip_counts.reason} reports Chip Count {counts[0]}",
            )
    return DetectedValue(None, f"{reason}, which is not a known generation")


def _read_driver_file_or_header(machine: Machine, answer: DetectedValue[str]) -> DetectedValue[str]:
    # Ascend Docker Runtime does not mount version.info, so the tool's own header has to do (driver and tool
    # are installed together).
    file = machine.read(DRIVER_FILE)
    match = re.search(r"^Version=(\S+)", file.value or "", re.MULTILINE | re.IGNORECASE)
    if match:
        return DetectedValue(match[1], DRIVER_FILE)
    version = parse_tool_version(answer.value or "")
    return DetectedValue(
        version, f"{answer.reason}, the header" if version else f"{file.reason}; {answer.reason}"
    )


def read_cann_version(machine: Machine) -> DetectedValue[str]:
    """Return the version of the CANN toolkit, which torch-npu needs even on a machine without an NPU."""
    roots = [
        machine.environ[name]
        for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
        if machine.environ.get(name)
    ]
    for root in [*roots, *TOOLKIT_DIRECTORIES]:
        for architecture in ("aarch64", "x86_64"):
            path = f"{root.rstrip('/')}/{architecture}-linux/ascend_toolkit_install.info"
            match = re.search(r"^version=(\S+)", machine.read(path).value or "", re.MULTILINE)
            if match:
                return DetectedValue(match[1], path)
    directories = ", ".join([*roots, *TOOLKIT_DIRECTORIES])
    return DetectedValue(None, f"no <arch>-linux/ascend_toolkit_install.info under {directories}")


def _collect_notes(machine: Machine, rows: tuple[TableRow, ...], numbers: list[int]) -> tuple[str, ...]:
    notes = [
        f"NPU {row.npu} chip {row.chip} reports health {row.health!r}" for row in rows if row.health != "OK"
    ]
    if rows and len(rows) != len(numbers):
        notes.append(
            f"npu-smi lists {len(rows)} devices, but /dev has {len(numbers)}. Those in /dev are used"
        )
    missing = [n for n in ("davinci_manager", "devmm_svm", "hisi_hdc") if n not in machine.list_names("/dev")]
    if missing:
        notes.append(f"/dev lacks {', '.join(missing)}. The runtime needs them in addition to davinci<N>")
    return tuple(notes)


def parse_npu_smi_table(text: str) -> tuple[TableRow, ...]:
    """Return the devices of an `npu-smi info` table in its own order; none if the text is not such a table.

    Columns and widths change with version and product; one device is one pair of rows. Seen: npu-smi 24.1 to
    26.0 on A2 (no Phy-ID column), A3 (two chips per NPU id, the second without power), and 310 cards
    (`Device` instead of `Phy-ID`, no HBM column).
    """
    rows: list[TableRow] = []
    has_number = False
    first_cells: list[str] | None = None  # the first row of a pair
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3 or not line.lstrip().startswith("|"):
            first_cells = None  # a rule, the version line, or the process table
        elif cells[0].startswith("Chip"):
            has_number = len(cells[0].split()) > 1
            first_cells = None
        elif first_cells is None:
            first_cells = cells if re.match(rf"{NUMBER_PATTERN}\s+\S", cells[0]) else None
        else:
            row = _parse_row(first_cells, cells, has_number)
            rows += [row] if row else []
            first_cells = None
    return tuple(rows)


def _parse_row(first_cells: list[str], second_cells: list[str], has_number: bool) -> TableRow | None:
    npu, name = first_cells[0].split(maxsplit=1)
    ids = second_cells[0].split()
    if not ids or not re.fullmatch(NUMBER_PATTERN, ids[0]):
        return None
    number = int(ids[1]) if has_number and len(ids) > 1 and re.fullmatch(NUMBER_PATTERN, ids[1]) else None
    # DDR comes before HBM; 310 cards have the first only. The last pair is the memory that tensors live in.
    usage = re.findall(_MEMORY_USAGE_PATTERN, second_cells[2])
    memory = int(usage[-1][1]) if usage else None
    return TableRow(int(npu), int(ids[0]), number, name, first_cells[1], second_cells[1], memory or None)


def parse_tool_version(text: str) -> str | None:
    """Return the version in the header line, for example `npu-smi 25.2.1   Version: 25.2.1`."""
    match = re.search(r"Version:\s*([^\s|]+)", text)
    return match[1] if match else None


def select_visible(value: str | None, count: int) -> Selection:
    """Return the NPUs that ASCEND_RT_VISIBLE_DEVICES leaves, as logical ids in this container.

    Parsing stops at the first character or id that is wrong. A blank is wrong: `1, 2,3` means 1. Ids must
    ascend, or the runtime refuses every device: "it must be configured in ascending order"
    (gpustack/gpustack#2527). Source of the rest: CANN environment variable reference 07_0028.
    """
    if value is None:
        return Selection(tuple(range(count)), f"{VISIBLE_DEVICES} is not set: all {count} are visible")
    shown = format_short_assignment(VISIBLE_DEVICES, value)
    chosen: list[int] = []
    entries = value.split(",")
    for entry in entries:
        if not re.fullmatch(rf"[0-9]{{1,{MOST_DIGITS}}}", entry) or int(entry) >= count:
            break
        chosen.append(int(entry))
    if any(later <= earlier for earlier, later in pairwise(chosen)):
        fixed = ",".join(map(str, sorted(set(chosen))))
        return Selection(
            (),
            shown,
            f"{shown} does not ascend, so the runtime refuses all devices. Set {VISIBLE_DEVICES}={fixed}",
        )
    return Selection.from_list(shown, entries, chosen, "is not the id of a device here")
