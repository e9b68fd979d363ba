"""What it costs that all ranks and agents of a job connect to one store, that of node 0.

python -m benchmarks.store [--nodes N...] [--ranks-per-node N]

One process has the TCPStore that torchrun starts. Others open a connection for each rank and each agent,
write a key over each, wait until all are there, and read one. Ends with 1 where a connection fails, or where
the store's process has more open files than `plan` says. A name server that does not answer delays them.
"""

import argparse
import multiprocessing
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

from torch.distributed import TCPStore

from bundle.environment.hardware import count_node_0_open_files

TIMEOUT = timedelta(minutes=10)
_CLIENT_PROCESSES = 4
_THREADS = 64
_PORTS_PER_ADDRESS = 16384  # fewer than the ports that the kernel has for one address of the server


def main() -> int:
    """Print a table; return 1 where a row fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", nargs="+", type=int, default=[8, 128, 1024, 2048])
    parser.add_argument("--ranks-per-node", type=int, default=8)
    arguments = parser.parse_args()
    most = max(count_node_0_open_files(nodes, arguments.ranks_per_node) for nodes in arguments.nodes)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard not in (resource.RLIM_INFINITY, max(hard, most)):
        parser.error(f"the store needs {most} open files, but may have {hard} (`ulimit -Hn`). Lower --nodes")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print("| nodes | connections | open files | of the plan | MiB | s to connect | s to exchange |")
    print("|---|---|---|---|---|---|---|")
    failed = False
    for nodes in arguments.nodes:
        connections = nodes * (arguments.ranks_per_node + 1)
        planned = count_node_0_open_files(nodes, arguments.ranks_per_node)
        files, megabytes, connecting, exchanging = measure_store(connections)
        cells = (f"{nodes:,}", f"{connections:,}", f"{files:,}", f"{planned:,}")
        print(f"| {' | '.join(cells)} | {megabytes:.0f} | {connecting:.1f} | {exchanging:.1f} |", flush=True)
        failed |= files > planned
    return int(failed)


def measure_store(connections: int) -> tuple[int, float, float, float]:
    """Return the server's open files, its memory [MiB], and the seconds to connect and to exchange keys."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve_store, args=(theirs,), daemon=True)
    server.start()
    port = ours.recv()
    barrier = context.Barrier(_CLIENT_PROCESSES + 1)
    clients = [
        context.Process(target=use_store, args=(port, part, connections, barrier), daemon=True)
        for part in range(_CLIENT_PROCESSES)
    ]
    for client in clients:
        client.start()
    barrier.wait(TIMEOUT.total_seconds())
    started = time.monotonic()
    barrier.wait(TIMEOUT.total_seconds())
    connected = time.monotonic()
    barrier.wait(TIMEOUT.total_seconds())
    exchanged = time.monotonic()
    files = len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
    status = Path(f"/proc/{server.pid}/status").read_text()
    megabytes = int(status.split("VmRSS:")[1].split()[0]) / 1024
    barrier.wait(TIMEOUT.total_seconds())
    for client in clients:
        client.join()
    ours.send(None)
    server.join()
    if any(process.exitcode for process in (server, *clients)):
        raise SystemExit("a connection failed; its error is above")
    return files, megabytes, connected - started, exchanged - connected


def serve_store(pipe: Connection) -> None:
    """Run the store as torchrun's agent of node 0 does, until the other side says so."""
    store = TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def use_store(port: int, part: int, connections: int, barrier) -> None:  # type: ignore[no-untyped-def]
    """Open every connection whose number is `part` modulo the processes, and exchange keys over each."""
    numbers = range(part, connections, _CLIENT_PROCESSES)
    barrier.wait()

    def connect(number: int) -> TCPStore:
        host = f"127.0.0.{1 + number // _PORTS_PER_ADDRESS}"
        return TCPStore(host, port, is_master=False, timeout=TIMEOUT)

    with ThreadPoolExecutor(_THREADS) as threads:
        stores = list(threads.map(connect, numbers))
    barrier.wait()
    for number, store in zip(numbers, stores, strict=True):
        store.set(f"address/{number}", f"10.0.{number >> 8 & 255}.{number & 255}")
        store.add("count", 1)
    last = f"address/{connections - 1}"
    while stores[0].add("count", 0) < connections:
        time.sleep(0.01)
    for store in stores:
        store.get(last)
    barrier.wait()
    barrier.wait()  # until the server is measured


if __name__ == "__main__":
    sys.exit(main())
