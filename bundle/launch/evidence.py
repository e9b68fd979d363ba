"""The evidence about a launch on one node after its end, from which the verdict is made."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from bundle import files
from bundle.errors import ExitCode
from bundle.launch import hang, network, outcomes
from bundle.launch.hang import RankSnapshot
from bundle.launch.network import NodeConnections
from bundle.launch.outcomes import RankState
from bundle.launch.rendezvous import Rendezvous

_KERNEL_LOG_DEVICE = Path("/dev/kmsg")
_RECORD_BYTES = 8192  # bytes; the kernel's limit of a record
_TAIL_BYTES = 1 << 16  # bytes of the end of a log that are read


class RankLog(NamedTuple):
    """The end of a rank's stderr, and the path of the whole log."""

    path: Path
    tail: str


@dataclass(frozen=True)
class LaunchEvidence:
    """The data about a launch on one node after its end.

    `status` is torchrun's exit status and `agent_log` its output; `logs` are by local rank. `snapshots` are
    of the ranks of all nodes in a hang. `stop_signal` is the signal that we got. `wait_failure` describes a
    wait for other nodes that was too long.

    `kernel_lines` are the lines of the kernel's log during the launch, where we may read it.
    `has_memory_kills`: the kernel killed processes of any user for lack of memory. `has_killed_ranks`: we
    killed ranks that outlived a failure. `has_failed_elsewhere`: that failure was on another node. `notices`
    are lines about stragglers before the end. `agent_pid` is the process of torchrun. `storage_failure`
    describes why the log folder cannot be written after the end. `connections` are those of the nodes in a
    hang.
    """

    status: int
    node: str = ""
    node_rank: int = 0
    nodes: int = 1
    per_node: int = 1
    outcomes: tuple[RankState, ...] = ()
    agent_log: str = ""
    logs: Mapping[int, RankLog] = field(default_factory=dict)
    snapshots: tuple[RankSnapshot, ...] = ()
    kernel_lines: tuple[str, ...] = ()
    has_memory_kills: bool = False
    stop_signal: int | None = None
    has_killed_ranks: bool = False
    has_failed_elsewhere: bool = False
    wait_failure: str = ""
    notices: tuple[str, ...] = ()
    agent_pid: int = 0
    storage_failure: str = ""
    connections: tuple[NodeConnections, ...] = ()


class KernelLogTail:
    """The lines that the kernel logs from now on; none where we may not read them, as in most containers."""

    def __init__(self, path: Path = _KERNEL_LOG_DEVICE) -> None:
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError:
            self.close()

    def read_new_lines(self) -> tuple[str, ...]:
        """Return the new lines since the last call, or since the start; without their time and level."""
        lines: list[str] = []
        while self._descriptor is not None:
            try:
                record = os.read(self._descriptor, _RECORD_BYTES)
            except BrokenPipeError:
                continue  # the log overflowed and some records are lost
            except OSError:
                break
            if not record:
                break
            # "level,number,microseconds,flags;text"; details follow in further lines.
            text = record.decode("utf-8", errors="replace").splitlines()[0]
            lines.append(text.partition(";")[2])
        return tuple(lines)

    def close(self) -> None:
        """Close the kernel's log."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None


def gather_evidence(
    folder: Path,
    rendezvous: Rendezvous,
    per_node: int,
    status: int,
    *,
    stop_signal: int | None = None,
    has_killed_ranks: bool = False,
    has_hung: bool = False,
    has_failed_elsewhere: bool = False,
    wait_failure: str = "",
    kernel_lines: tuple[str, ...] = (),
    has_memory_kills: bool = False,
    agent_pid: int = 0,
    storage_failure: str = "",
    local_folder: Path | None = None,
) -> LaunchEvidence:
    """Return the evidence in the log folder of a launch and on its node, with what its starter has seen.

    `has_hung`: the starter killed ranks in a hang; a rank without an exit code then counts as killed in the
    hang.
    """
    world = outcomes.read_world_folder_path(folder) or folder
    log_paths = {
        int(path.parent.name): path for path in files.list_matches(folder, "*/attempt_*/*/stderr.log")
    }
    return LaunchEvidence(
        status=status,
        node=outcomes.get_node_name(),
        node_rank=rendezvous.node_rank,
        nodes=rendezvous.nodes,
        per_node=per_node,
        outcomes=tuple(
            _mark_live_rank_as_hung(outcome) if has_hung else outcome
            for outcome in outcomes.read(folder, local_folder)
        ),
        agent_log=read_tail(folder / "agent.log"),
        logs={local_rank: RankLog(path, read_tail(path)) for local_rank, path in log_paths.items()},
        snapshots=tuple(hang.read(world)),
        kernel_lines=kernel_lines,
        has_memory_kills=has_memory_kills,
        stop_signal=stop_signal,
        has_killed_ranks=has_killed_ranks,
        has_failed_elsewhere=has_failed_elsewhere,
        wait_failure=wait_failure,
        notices=outcomes.read_recent_notices(folder),
        agent_pid=agent_pid,
        storage_failure=storage_failure,
        connections=network.read(world),
    )


def _mark_live_rank_as_hung(outcome: RankState) -> RankState:
    return (
        outcome
        if outcome.code is not None
        else replace(outcome, code=int(ExitCode.HANG), message="killed in a hang")
    )


def read_tail(path: Path) -> str:
    """Return the end of a file; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
