"""A rank without torch: does what its first argument says, and ends as ranks of ours do.

tests.launch.launched starts it through an agent, which makes a verdict of its end: no World has one.
"""

import fcntl
import os
import resource
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from bundle import files
from bundle.errors import BundleError, EnvironmentUnfit, ExitCode, Preempted
from bundle.launch import outcomes
from bundle.launch.orphans import die_with_torchrun_agent

RANK, LOCAL_RANK = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])


def wait_for_request() -> None:
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    Path(f"ready-{RANK}").touch()
    while not asked and not outcomes.is_stop_requested():
        time.sleep(0.02)
    raise Preempted(f"saved step 7 on request of rank {RANK}")


def sleep() -> None:
    Path(f"ready-{RANK}").touch()
    time.sleep(60)


def fail() -> None:
    if RANK == 1:
        print("what the log says", file=sys.stderr)
        raise ValueError("corrupt shard 3")
    sleep()


def unfit() -> None:
    if RANK == 1:
        raise EnvironmentUnfit("no such device")
    sleep()


def mourn() -> None:
    """Breaks when a rank of the other node is gone, as one does whose connection is."""
    world = Path(os.environ["TEST_WORLD"])
    outcomes.publish_world_folder_to_launcher(world, int(os.environ["GROUP_RANK"]), LOCAL_RANK)
    (world / f"ready-{RANK}").write_text(str(os.getpid()))
    peer = world / f"ready-{2 - RANK}" if RANK in (0, 2) else None
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.05)
        pid = peer.read_text() if peer and peer.exists() else ""
        if pid and not Path("/proc", pid).exists():
            raise RuntimeError("[gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:34567")


def meet() -> None:
    outcomes.publish_world_folder_to_launcher(Path("world").absolute(), 0, LOCAL_RANK)
    sleep()


def deaf() -> None:
    """Waits for a rank of the other node, and does not notice when that is gone."""
    world = Path(os.environ["TEST_WORLD"])
    outcomes.publish_world_folder_to_launcher(world, int(os.environ["GROUP_RANK"]), LOCAL_RANK)
    (world / f"ready-{RANK}").touch()
    time.sleep(300)


def grow() -> None:
    """Rank 1 takes ever more memory, within a group of processes that has little, or may not have more."""
    if RANK == 1 and "TEST_CGROUP" in os.environ:
        Path(os.environ["TEST_CGROUP"], "cgroup.procs").write_text(str(os.getpid()))
    elif RANK == 1:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
    taken = []
    while RANK == 1:
        taken.append(b"x" * (1 << 24))
    sleep()


def write() -> None:
    """Rank 0 writes a file again and again in the folder of its second argument, and locks "writing" for it.

    With a third one, rank 1 does not end when it is asked to.
    """
    if RANK == 1 and sys.argv[3:]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(f"ready-{RANK}").touch()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if RANK == 0:
            with Path("writing").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                files.write_text(Path(sys.argv[2], "state"), "x")


def talk() -> None:
    """Rank 0 and the first of the other node send to each other; all hang 2 s after `cut` is there."""
    world = Path(os.environ["TEST_WORLD"])
    outcomes.publish_world_folder_to_launcher(world, int(os.environ["GROUP_RANK"]), LOCAL_RANK)
    address = (os.environ["MASTER_ADDR"], int(os.environ["TEST_PORT"]))
    peer: socket.socket | None = None
    if RANK == 0:
        peer, _ = socket.create_server(address).accept()
    elif LOCAL_RANK == 0:
        while peer is None:
            with suppress(ConnectionRefusedError):
                peer = socket.create_connection(address)
    (world / f"ready-{RANK}").touch()
    while not (world / "cut").exists():
        time.sleep(0.1)
        if peer:
            peer.sendall(b"x")
    if peer:
        peer.sendall(b"x")
    time.sleep(2)
    outcomes.request_hang_snapshots()
    time.sleep(3)
    hang = BundleError("no progress for 2 s in step 4")
    hang.code = ExitCode.HANG
    raise hang


def unbound() -> None:
    """Does not end with its agent."""
    sleep()


def stubborn() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep()


def count_files() -> None:
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def well() -> None:
    print(f"rank {RANK} of {os.environ['WORLD_SIZE']} {sys.argv[2:]}")


if __name__ == "__main__":
    if sys.argv[1] != "unbound":
        die_with_torchrun_agent()
    os._exit(outcomes.run_and_report(RANK, LOCAL_RANK, globals()[sys.argv[1]]))
