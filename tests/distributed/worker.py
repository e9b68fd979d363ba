"""A rank that opens the store, makes a group and then does what its first argument says.

tests.launch.launched starts it through an agent, whose store, signals and verdict it is there for: no World.
"""

import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from bundle import backends
from bundle.distributed import watchdog, world
from bundle.distributed.world import StopRequest
from bundle.errors import Preempted
from bundle.launch import orphans, outcomes
from bundle.launch.rendezvous import Rendezvous, discover
from bundle.recipe import Parallel


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
    assert not request.agree_to_stop()
    if me.rank == 1:
        os.kill(os.getpid(), 15)
    while not request.is_requested and me.rank == 1:
        time.sleep(0.01)
    agreed = request.agree_to_stop()
    late = StopRequest(torch.device("cpu"))
    late.begin_exchange()
    if me.rank == 1:
        late.is_requested = True
    assert [late.agree_to_stop(), late.agree_to_stop()] == [False, True]
    if me.rank == 0:
        print(f"listeners={listeners()} agreed={agreed}")


def stop(me: Rendezvous) -> None:
    request = StopRequest(torch.device("cpu"))
    Path(f"ready-{me.rank}").touch()
    while not request.agree_to_stop():
        time.sleep(0.05)
    raise Preempted("saved")


def hang(me: Rendezvous) -> None:
    """Rank 1 never comes to the second collective: its process is stopped, or reads a pipe without end."""
    group = dist.new_group([0, 1], group_desc="TENSOR_PARALLEL")
    outcomes.publish_world_folder_to_launcher(Path("dumps"), me.node_rank, me.local_rank or 0)
    with watchdog.Watchdog(2.0, Path("dumps"), me.rank or 0, me.local_rank or 0) as dog:
        dist.all_reduce(torch.ones(2, 3), group=group)
        dog.report_progress("step 4")
        if me.rank == 1 and sys.argv[2] == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if me.rank == 1 and sys.argv[2] == "patient":
            with dog.extend_patience("reading the data"):
                read_without_end()
        if me.rank == 1:
            read_without_end()
        dist.all_reduce(torch.ones(2, 3), group=group)


def read_without_end() -> None:
    end, _ = os.pipe()
    os.read(end, 1)


def alone(me: Rendezvous) -> None:
    """Megatron's MTP losses, reduced by the rank that writes metrics alone: it waits for one that went on."""
    runtime = backends.set_up_runtime("cpu")
    outcomes.publish_world_folder_to_launcher(Path("dumps"), me.node_rank, me.local_rank or 0)
    with runtime.megatron_calls():
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        from bundle.mcore import groups

        groups.create_model_parallel_groups(Parallel(tp=1, cp=2, ep=1, etp=1), seed=1, timeout_seconds=60)
        both = dist.new_group([0, 1])
        with watchdog.Watchdog(2.0, Path("dumps"), me.rank or 0, me.local_rank or 0) as dog:
            dog.report_progress("step 4")
            MTPLossLoggingHelper.save_loss_to_tracker(torch.tensor(1.0), 0, 1, avg_group=both)
            if me.rank == 0:
                MTPLossLoggingHelper.reduce_loss_in_tracker()
            dog.report_progress("step 5")
            dist.broadcast(torch.ones(4), 0)


def impatient(me: Rendezvous) -> None:
    """Hangs inside a patience, or after one that would have lasted much longer."""
    inside = sys.argv[2] == "inside"
    with watchdog.Watchdog(2.0, Path("logs"), me.rank or 0, me.local_rank or 0) as dog:
        with dog.extend_patience("saving step 3", 4.0 if inside else 100.0):
            # Longer than the watchdog's look around: it has seen the patience.
            time.sleep(60 if inside else 2.5)
        dog.report_progress("step 4")
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
    world.initialize(me, world.open_store(me, minute), "gloo", minute)
    globals()[sys.argv[1]](me)
    world.destroy_process_groups()


if __name__ == "__main__":
    orphans.die_with_torchrun_agent()
    sys.exit(outcomes.run_and_report(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), main))
