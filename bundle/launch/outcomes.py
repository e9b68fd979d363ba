"""The end of each rank of this node. torchrun always returns 1, so ranks write down the reason."""

import json
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bundle import files
from bundle.errors import BundleError, ExitCode, JobFailed

_log = logging.getLogger(__name__)

# The variable with the folder of one launch on one node; unset where another launcher started the ranks.
LAUNCH_FOLDER_VARIABLE = "BUNDLE_OUTCOMES"
# The variable with the folder on this node that gets what cannot be written to that of the launch.
FALLBACK_FOLDER_VARIABLE = "BUNDLE_LOCAL_OUTCOMES"
# The variable with the name of a pod's node; the host name is that of the pod.
KUBERNETES_NODE_VARIABLE = "K8S_NODE_NAME"
AGENT_PID_FILE = "agent.pid"
STOP_FILE, HANG_FILE = "stop", "hang"
NOTICES_FILE, _MOST_NOTICES = "noticed.log", 4
# In the folder of a launch on one node: the file with the path of the folder that all nodes share.
WORLD_FOLDER_PATH_FILE = "world"
# In the shared folder: the names and verdicts of nodes, apart from the snapshots of ranks in a hang.
NODES_FOLDER = "nodes"


@dataclass(frozen=True)
class RankState:
    """The state of one rank: alive while `code` is None; `time` is when it wrote this [s since the epoch].

    `explained`: the message says what is wrong, rather than what broke.
    """

    rank: int
    local_rank: int
    pid: int
    time: float
    code: int | None = None
    message: str = ""
    explained: bool = False


def find_next_log_folder(run: Path, node_rank: int) -> Path:
    """Return the log folder of this node's next launch in a run directory; it is not created."""
    node_folder = run / "logs" / f"node-{node_rank}"
    numbers = [int(path.name) for path in node_folder.glob("*") if path.name.isdecimal()]
    return node_folder / str(max(numbers, default=0) + 1)


def build_failed_start_path(folder: Path) -> Path | None:
    """Return the file for the failure of a node before the nodes met; None outside of a run directory.

    `folder` is the log folder of a launch on one node.
    """
    logs = folder.parent.parent
    return logs / "failed-start.json" if logs.name == "logs" else None


def count_earlier_node_launches() -> int:
    """Return the number of launches of this run on this node before this one, by our launcher."""
    folder = get_launch_folder()
    return int(folder.name) - 1 if folder and folder.name.isdecimal() else 0


def get_node_name() -> str:
    """Return the name by which this node can be excluded: of Slurm, Kubernetes, or the host."""
    return (
        os.environ.get("SLURMD_NODENAME") or os.environ.get(KUBERNETES_NODE_VARIABLE) or socket.gethostname()
    )


def get_launch_folder() -> Path | None:
    """Return the folder of this launch; None for a rank that another launcher started."""
    value = os.environ.get(LAUNCH_FOLDER_VARIABLE)
    return Path(value) if value else None


def choose_disk_failure_folder() -> Path | None:
    """Return the folder on this node for a launch whose disk fails; it does not exist yet.

    Return None where this node has no directory for temporary files.
    """
    try:
        return Path(tempfile.gettempdir(), f"mcore-bundle-{secrets.token_hex(8)}")
    except FileNotFoundError:
        return None


def write_on_any_disk(name: str, values: Mapping[str, Any], folder: Path, local_folder: Path | None) -> Path:
    """Write JSON values to `folder`, or to `local_folder` where that fails; return the file.

    Raise JobFailed.
    """
    try:
        files.write_json(folder / name, values)
        return folder / name
    except JobFailed:
        if local_folder is None:
            raise
        with files.convert_write_errors(local_folder):
            local_folder.mkdir(mode=0o700, exist_ok=True)
        files.write_json(local_folder / name, values)
        return local_folder / name


def write(outcome: RankState) -> None:
    """Write the state of a rank, in one rename, where the launcher reads it."""
    folder, local_folder = get_launch_folder(), os.environ.get(FALLBACK_FOLDER_VARIABLE)
    if folder is not None:
        name = f"rank-{outcome.rank}.json"
        write_on_any_disk(name, asdict(outcome), folder, Path(local_folder) if local_folder else None)


def read(folder: Path, local_folder: Path | None = None) -> list[RankState]:
    """Return the outcomes of the ranks of a launch, in the order of the ranks.

    A rank writes to `local_folder` what it cannot write to `folder`, so that is newer.
    """
    texts = {
        path.name: text
        for place in filter(None, (folder, local_folder))
        for path in files.list_matches(place, "rank-*.json")
        if (text := files.read_text_if_small(path))
    }
    return sorted(
        (RankState(**json.loads(text)) for text in texts.values()), key=lambda outcome: outcome.rank
    )


def publish_world_folder_to_launcher(world: Path, node_rank: int, local_rank: int) -> None:
    """Create the folder that all ranks of this launch share, and write its path for the launcher.

    Nodes that share the run directory share the folder; the first rank of each node writes the node's name
    there.
    """
    (world / NODES_FOLDER).mkdir(parents=True, exist_ok=True)
    folder = get_launch_folder()
    if local_rank == 0 and folder is not None:
        files.write_json(world / NODES_FOLDER / f"{node_rank}.json", {"node": get_node_name()})
        files.write_text(folder / WORLD_FOLDER_PATH_FILE, str(world.absolute()))


def read_world_folder_path(folder: Path) -> Path | None:
    """Return the folder that `publish_world_folder_to_launcher` made for the launch with this log folder.

    Return None where ranks never met.
    """
    path = files.read_text_if_small(folder / WORLD_FOLDER_PATH_FILE)
    return Path(path) if path else None


def request_hang_snapshots() -> None:
    """Tell all ranks of this node to write their snapshots."""
    if folder := get_launch_folder():
        with suppress(OSError):  # a hang on a full disk is still a hang
            (folder / HANG_FILE).touch()


def is_node_hang_announced() -> bool:
    """Return whether a rank of this node has noticed a hang."""
    folder = get_launch_folder()
    return folder is not None and (folder / HANG_FILE).exists()


def record_notice(message: str) -> None:
    """Log an unusual event of a rank, and keep it for the verdict of this launch."""
    _log.warning(message)
    if folder := get_launch_folder():
        with suppress(OSError), (folder / NOTICES_FILE).open("a", encoding="utf-8") as file:
            print(message, file=file)


def read_recent_notices(folder: Path) -> tuple[str, ...]:
    """Return the last notices of the ranks of this node."""
    return tuple((files.read_text_if_small(folder / NOTICES_FILE) or "").splitlines()[-_MOST_NOTICES:])


def is_stop_requested() -> bool:
    """Return whether the launcher was told to stop, perhaps before this rank could take a signal."""
    folder = get_launch_folder()
    return folder is not None and (folder / STOP_FILE).exists()


def run_and_report(rank: int, local_rank: int, body: Callable[[], None]) -> ExitCode:
    """Run `body`, the work of a rank, write how it ended, and return the rank's exit code.

    The launcher and the rank's log get the outcome. For torchrun under our launcher, a rank that saved and
    stopped as told has ended well.
    """
    # Our launcher starts ranks that ignore SIGTERM; it must end a rank that cannot save yet.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    write(RankState(rank, local_rank, os.getpid(), time.time()))
    code, message, explained = ExitCode.OK, "", True
    try:
        body()
    except BundleError as error:
        code, message = ExitCode(error.code), str(error)
    except KeyboardInterrupt:
        code, message = ExitCode.INTERRUPTED, "interrupted"
    except BaseException as error:  # noqa: BLE001  whatever ends a rank; torch has some that are no Exception
        code, message, explained = ExitCode.JOB_FAILED, f"{type(error).__name__}: {error}", False
        with suppress(OSError):  # the rank's log may be on the disk that failed
            traceback.print_exc()
    report_end(rank, local_rank, code, message, explained=explained)
    # At any code but 0, torchrun logs a traceback and kills the ranks that still save.
    return ExitCode.OK if code is ExitCode.PREEMPTED and get_launch_folder() else code


def report_end(
    rank: int, local_rank: int, code: ExitCode, message: str = "", *, explained: bool = True
) -> None:
    """Write the outcome of a rank that ends, also to stderr, which is the rank's log."""
    with suppress(OSError):  # stderr may be on the disk that failed
        try:
            write(RankState(rank, local_rank, os.getpid(), time.time(), int(code), message, explained))
        except JobFailed as error:  # a full disk must not hide why the rank ends
            print(f"cannot write this rank's outcome: {error}", file=sys.stderr)
        if message:
            print(f"rank {rank}: {message}", file=sys.stderr, flush=True)


def format_ranks(ranks: Sequence[int]) -> str:
    """Return a short list of ranks, for example "rank 3" or "ranks 0-3, 8"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    joined = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {joined}"
