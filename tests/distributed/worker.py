"""A rank that opens the store, makes a group and then does what its first argument says."""

import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from bundle.distributed import watchdog, world
from bundle.distributed.world import StopRequest
from bundle.errors import Preempted
from bundle.launch import outcomes, process
from bundle.launch.rendezvous import Rendezvous, discover


def listeners() -> str:
    """The local addresses of this process's listening TCP sockets, as the kernel prints them."""
    inodes = {link.readlink().name for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.append(fields[1].split(":")[0])
    return ",".join(sorted(set(found)))


def collectives(me: Rendezvous) -> None:
    request = StopRequest(torch.device("cpu"))
    assert not request.agreed()
    if me.rank == 1:
        os.kill(os.getpid(), 15)
    while not request.heard and me.rank == 1:
        time.sleep(0.01)
    agreed = request.agreed()
    if me.rank == 0:
        print(f"listeners={listeners()} agreed={agreed}")


def stop(me: Rendezvous) -> None:
    request = StopRequest(torch.device("cpu"))
    Path(f"ready-{me.rank}").touch()
    while not request.agreed():
        time.sleep(0.05)
    raise Preempted("saved")


def hang(me: Rendezvous) -> None:
    with watchdog.Watchdog(2.0, Path("dumps"), me.rank or 0, me.local_rank or 0) as dog:
        dog.beat("step 4")
        if me.rank == 1 and sys.argv[2] == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if me.rank == 1:
            time.sleep(60)
        dist.all_reduce(torch.ones(1))


def impatient(me: Rendezvous) -> None:
    """Hangs inside a patience, or after one that would have lasted much longer."""
    inside = sys.argv[2] == "inside"
    with watchdog.Watchdog(2.0, Path("dumps"), me.rank or 0, me.local_rank or 0) as dog:
        with dog.patience("saving step 3", 4.0 if inside else 100.0):
            # Longer than the watchdog's look around: it has seen the patience.
            time.sleep(60 if inside else 2.5)
        dog.beat("step 4")
        time.sleep(60)


def crowded(me: Rendezvous) -> None:
    """Says how many ranks have met, although nobody could on torchrun's port."""
    count = torch.ones(1)
    dist.all_reduce(count)
    if me.rank == 0:
        print(f"{count.item():.0f} ranks met")


def main() -> None:
    me, minute = discover(os.environ), timedelta(seconds=60)
    watchdog.show_stacks_on_request()
    if sys.argv[1] == "crowded" and me.rank == 0:
        assert me.port is not None
        another = socket.create_server(("127.0.0.1", me.port))
        another.detach()  # it stays open as long as this process lives
    world.initialize(me, world.open_store(me, minute), "gloo", minute, torch.device("cpu"))
    globals()[sys.argv[1]](me)
    world.destroy()


if __name__ == "__main__":
    process.die_with_parent()
    sys.exit(outcomes.report(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), main))
