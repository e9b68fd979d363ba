"""The state of this rank for the analysis of a hang: Python's stacks and torch's record of collectives."""

import os
import pickle
import sys
import sysconfig
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions

from bundle.launch.hang import Collective, RankSnapshot
from bundle.launch.outcomes import get_node_name

# The callers of these show what a rank does; torch calls _TORCH_FUNCTION_DUNDER_NAME for a facade.
# typing_extensions wraps functions that torch has marked as deprecated, collectives too.
_STDLIB_AND_TORCH_PATHS = (
    sysconfig.get_path("stdlib"),
    str(Path(torch.__file__).parent),
    str(typing_extensions.__file__),
    "<",
)
_TORCH_FUNCTION_DUNDER_NAME = "__torch_function__"


# The recorders of NCCL's groups, and of all others; a build may lack either.
_FLIGHT_RECORDER_DUMP_FUNCTIONS = ("_dump_nccl_trace", "_dump_fr_trace")
_FLIGHT_RECORDER_BUFFER_SIZE = (
    "2000"  # calls that a recorder keeps: newer builds' own default, where older ones keep none
)


def enable_flight_recorder() -> None:
    """Make torch record the collectives of this process; call this before the first group is made."""
    newer = hasattr(torch._C._distributed_c10d, "_dump_fr_trace")
    os.environ.setdefault(
        "TORCH_FR_BUFFER_SIZE" if newer else "TORCH_NCCL_TRACE_BUFFER_SIZE", _FLIGHT_RECORDER_BUFFER_SIZE
    )


def read_flight_records() -> list[bytes]:
    """Return torch's records of this process's collectives (pickles for its analyzer), NCCL's first."""
    bindings = torch._C._distributed_c10d
    recorders = [
        getattr(bindings, name) for name in _FLIGHT_RECORDER_DUMP_FUNCTIONS if hasattr(bindings, name)
    ]
    # Finding the source lines of the frames takes seconds, and the stacks are in the other file.
    return [bytes(recorder(includeStackTraces=False)) for recorder in recorders]


def take_snapshot(rank: int, doing: str, seconds: float, records: Sequence[bytes]) -> RankSnapshot:
    """Return the state of this rank; `records` is what `read_flight_records` returned."""
    entries = [entry for record in records for entry in _read_entries(record)]
    called = [entry for entry in entries if not entry.get("is_p2p")]
    # The first that is not over holds up those behind it. Gloo retires what is over, and says no more of it.
    under_way = [e for e in entries if not e.get("retired") and e.get("state") != "completed"]
    first = min(under_way, key=lambda entry: entry.get("time_created_ns", 0), default=None)
    return RankSnapshot(
        rank=rank,
        node=get_node_name(),
        doing=doing,
        seconds=seconds,
        frame=_describe_innermost_user_frame(),
        waits=_build_collective(first) if first else None,
        entered={
            _describe_group(entry)[0]: int(entry["collective_seq_id"])
            for entry in sorted(called, key=lambda entry: entry["collective_seq_id"])
        },
    )


def _read_entries(record: bytes) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = pickle.loads(record).get("entries", []) if record else []
    return entries


def _build_collective(entry: dict[str, Any]) -> Collective:
    name, ranks = _describe_group(entry)
    shapes = " and ".join("x".join(map(str, size)) for size in entry.get("input_sizes", ()))
    number = entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]
    description = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
    return Collective(name, ranks, int(number), description + (f" of shape {shapes}" if shapes else ""))


def _describe_group(entry: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Return the name that all ranks have for the group of a call, and the group's ranks."""
    name, described = entry["process_group"]
    groups = {group_name: group for group, group_name in dist.distributed_c10d._world.pg_names.items()}
    ranks = tuple(dist.get_process_group_ranks(groups[name])) if name in groups else ()
    kind = "the group of all ranks" if described == "default_pg" else f"group {name}"
    kind += f" {described}" if described not in ("default_pg", "undefined", "") else ""
    return kind, ranks


def _describe_innermost_user_frame() -> str:
    """Return the innermost frame of the main thread outside libraries, or else a library's."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    own_frames = [
        candidate
        for candidate in frames
        if not (
            candidate[0].startswith(_STDLIB_AND_TORCH_PATHS) or candidate[2] == _TORCH_FUNCTION_DUNDER_NAME
        )
    ]
    for name, line, function in (own_frames or frames)[:1]:
        return f"`{function}` ({Path(name).name}:{line})"
    return ""
