"""Which devices a visibility variable leaves to a process, by each vendor's own rules.

CUDA: measured with cuInit and cuDeviceGetUuid on driver 580.159.04 (CUDA programming guide 5.2.1.1 says the
same where it says anything). Ascend: CANN environment variable reference 07_0028, and the runtime's own
message.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

CUDA = "CUDA_VISIBLE_DEVICES"
ASCEND = "ASCEND_RT_VISIBLE_DEVICES"

# The driver reads an index as strtol does: blanks, a sign, digits; whatever follows the digits is ignored.
_LEADING_INTEGER = r"[ \t\n\v\f\r]*([+-]?[0-9]+)"

_DIGITS = 18  # more of them name no device, whatever they are


@dataclass(frozen=True)
class Selection:
    """The chosen positions in the order a framework counts them; `fault` if the driver refuses the value."""

    chosen: tuple[int, ...]
    reason: str
    fault: str | None = None


def cuda(value: str | None, uuids: Sequence[str], instances: Sequence[str] = ()) -> Selection:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, as positions in `uuids` (with MIG: in `instances`).

    Order is honoured and the list is cut at the first entry that names no device. The first entry decides
    whether entries are indices or UUID prefixes. A device named twice makes the driver refuse to start.
    """
    if instances:
        return _mig(value, instances)
    if value is None:
        return Selection(tuple(range(len(uuids))), f"{CUDA} is not set: all {len(uuids)} are visible")
    entries = value.split(",")
    by_uuid = entries[0].startswith("GPU-")
    chosen: list[int] = []
    for entry in entries:
        position = _by_prefix(entry, uuids) if by_uuid else _by_index(entry, len(uuids))
        if position is None or len(chosen) > len(uuids):
            break
        chosen.append(position)
    shown = _shown(CUDA, value)
    if len(set(chosen)) < len(chosen):
        return Selection(
            (), shown, f"{shown} names a device twice: CUDA refuses to start. Name each device once."
        )
    if len(chosen) < len(entries):
        unknown = entries[len(chosen)][:80]
        return Selection(tuple(chosen), f"{shown}: the list ends at {unknown!r}, which names no device here")
    return Selection(tuple(chosen), shown)


def _shown(name: str, value: str) -> str:
    return f"{name}={value}" if len(value) <= 200 else f"{name}={value[:200]}..."


def _by_index(entry: str, count: int) -> int | None:
    match = re.match(_LEADING_INTEGER, entry)
    if match is None or len(match[1]) > _DIGITS or not 0 <= int(match[1]) < count:
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
        return Selection((), f"{_shown(CUDA, value)}: {first[:80]!r} names no MIG instance here")
    return Selection((position,), f"{_shown(CUDA, value)}: {rule}")


def ascend(value: str | None, count: int) -> Selection:
    """The NPUs that ASCEND_RT_VISIBLE_DEVICES leaves, as logical ids in this container.

    Parsing stops at the first character or id that is wrong (a blank is wrong: `1, 2,3` means 1); ids must
    ascend, or the runtime refuses every device: "it must be configured in ascending order"
    (gpustack/gpustack#2527).
    """
    if value is None:
        return Selection(tuple(range(count)), f"{ASCEND} is not set: all {count} are visible")
    shown = _shown(ASCEND, value)
    chosen: list[int] = []
    entries = value.split(",")
    for entry in entries:
        if not re.fullmatch(rf"[0-9]{{1,{_DIGITS}}}", entry) or int(entry) >= count:
            break
        chosen.append(int(entry))
    if any(later <= earlier for earlier, later in pairwise(chosen)):
        fixed = ",".join(map(str, sorted(set(chosen))))
        return Selection(
            (), shown, f"{shown} does not ascend: the runtime refuses every device. Set {ASCEND}={fixed}"
        )
    if len(chosen) < len(entries):
        unknown = entries[len(chosen)][:80]
        return Selection(
            tuple(chosen), f"{shown}: the list ends at {unknown!r}, which is no id of a device here"
        )
    return Selection(tuple(chosen), shown)
