"""Where this rank stands, of Python's stacks and torch's record of collectives, for who looks into a hang."""

import pickle
import sys
import sysconfig
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bundle.launch.hang import Collective, Standing
from bundle.launch.outcomes import node_name

# Where a rank stands is told by what calls these, megatron or us; the last is what torch calls for a facade.
_LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(torch.__file__).parent), "<")
_BETWEEN = "__torch_function__"


def flight_record() -> bytes:
    """Returns torch's record of this process's collectives (a pickle, as its analyzer reads), or nothing."""
    bindings = torch._C._distributed_c10d
    # Gloo's (and every newer group's) recorder, then NCCL's own where the build has only that.
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        recorder = getattr(bindings, name, None)
        if recorder is not None:
            # Finding the source lines of the frames takes seconds, and the stacks are in the other file.
            return bytes(recorder(includeStackTraces=False))
    return b""


def standing(rank: int, doing: str, seconds: float, record: bytes) -> Standing:
    """Returns where this rank stands; `record` is what `flight_record` returned."""
    entries = pickle.loads(record).get("entries", []) if record else []
    called = [entry for entry in entries if not entry.get("is_p2p")]
    # The first that is not over holds up those behind it. Gloo retires what is over, and says no more of it.
    under_way = [e for e in entries if not e.get("retired") and e.get("state") != "completed"]
    return Standing(
        rank=rank,
        node=node_name(),
        doing=doing,
        seconds=seconds,
        frame=_frame(),
        waits=_collective(under_way[0]) if under_way else None,
        entered={
            _group(entry)[0]: int(entry["collective_seq_id"])
            for entry in sorted(called, key=lambda entry: entry["collective_seq_id"])
        },
    )


def _collective(entry: dict[str, Any]) -> Collective:
    name, ranks = _group(entry)
    sizes = " and ".join("x".join(map(str, size)) for size in entry.get("input_sizes", ())) or "nothing"
    number = entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]
    what = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
    return Collective(name, ranks, int(number), f"{what} of {sizes}")


def _group(entry: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    """The group of a call as all of its ranks name it, and its ranks."""
    name, described = entry["process_group"]
    groups = {its: group for group, its in dist.distributed_c10d._world.pg_names.items()}
    ranks = tuple(dist.get_process_group_ranks(groups[name])) if name in groups else ()
    kind = "all ranks" if described == "default_pg" else f"group {name}"
    kind += f" {described}" if described not in ("default_pg", "undefined", "") else ""
    return kind, ranks


def _frame() -> str:
    """The innermost frame of the main thread that is no library's; of a library where there is no other."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    ours = [each for each in found if not (each[0].startswith(_LIBRARIES) or each[2] == _BETWEEN)]
    for name, line, function in (ours or found)[:1]:
        return f"`{function}` ({Path(name).name}:{line})"
    return ""
