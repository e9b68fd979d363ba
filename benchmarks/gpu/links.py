"""Preflight's bandwidths beside a bare torch.distributed loop on two devices, and a hang that is named,
with what NCCL's own service says of it.

python -m benchmarks.gpu.links [--kind cpu]

Exit code 1 where they differ by more than 15 %, or where the hang is not told as what it is.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from bundle.distributed import watchdog, world
from bundle.distributed.watchdog import Watchdog, compute_collective_timeout
from bundle.environment import hardware
from bundle.errors import ExitCode
from bundle.launch import orphans, outcomes, process
from bundle.launch.command import Launch
from bundle.launch.process import LaunchFailed
from bundle.launch.rendezvous import discover
from bundle.preflight import measure_links

RANKS, NEAR = 2, 0.15
# Bytes as the probe has them: what is reduced and exchanged, and what goes over a link.
BYTES = {"cpu": 1 << 24, "cuda": 1 << 30}
REPEATS, HANG_SECONDS = 5, 10


def main(kind: str) -> int:
    backend = "cpu" if kind == "cpu" else "cuda"
    probed = measure_links(hardware.detect(backend), discover({}), {}, quick=False, devices=RANKS, wait=60.0)
    for probe, found in probed.items():
        print(f"{probe.subject} ({found.seconds:.0f} s): {found.wrong or dict(found.measured)}")
    first = next(iter(probed.values())).measured
    seen = {
        "all-reduce": first["GB/s all-reduce"],
        "all-to-all": first["GB/s all-to-all"],
        "link": min(found.measured[f"GB/s from device {1 - n}"] for n, found in enumerate(probed.values())),
    }
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    words = ["-m", "benchmarks.gpu.links", f"--kind={kind}", "--rank=bare"]
    said = subprocess.run([sys.executable, *torchrun, *words], stdout=subprocess.PIPE, check=True, text=True)
    good = True
    for name, bare in json.loads(said.stdout.splitlines()[-1]).items():
        near = abs(seen[name] / bare - 1) <= NEAR
        good &= near
        print(f"{'ok' if near else 'FAILED':<7}{name}: preflight {seen[name]:.4g} GB/s, bare loop {bare:.4g}")
    return 0 if named(kind) and good else 1


def named(kind: str) -> bool:
    """Whether a rank that never comes to a collective is named, and where it is instead."""
    with tempfile.TemporaryDirectory() as folder:
        launch = Launch(
            ("--rank=hang", f"--kind={kind}"),
            discover({}),
            RANKS,
            Path(folder) / "logs",
            module="benchmarks.gpu.links",
        )
        began = time.monotonic()
        try:
            process.run_ranks_once(launch, os.environ)
            said, code = "ended well", ExitCode.OK
        except LaunchFailed as ended:
            said, code = ended.verdict.sentence, ended.code
        services = [path.read_text() for path in Path(folder).rglob("hang-*.nccl.txt")]
    right = re.match(
        rf"no progress for {HANG_SECONDS} s: rank 0 in all_reduce of 2x3 \(call \d+ of all ranks\).*;"
        r" rank 1 on \S+ never entered it: it is at `read_for_ever` ",
        said,
    )
    good = bool(right) and code == ExitCode.HANG
    print(f"{'ok' if good else 'FAILED':<7}a hang, after {time.monotonic() - began:.0f} s: {said}")
    if kind == "cuda":
        heard = len(services) == 1 and "NCCL version" in services[0]
        print(f"{'ok' if heard else 'FAILED':<7}NCCL's own service:", *services, sep="\n")
        good &= heard
    return good


def bare(kind: str) -> None:
    """One rank of a plain loop; the first prints what it measured, in GB/s of the bus and of the link."""
    dist.init_process_group("gloo" if kind == "cpu" else "nccl")
    rank, device = dist.get_rank(), _device(kind, dist.get_rank())
    data = torch.ones(BYTES[kind] // 4, device=device)
    other, part = torch.empty_like(data), torch.full((BYTES[kind] // 16,), float(rank), device=device)
    came = torch.empty_like(part)

    def exchange() -> None:
        pair = [dist.P2POp(dist.isend, part, 1 - rank), dist.P2POp(dist.irecv, came, 1 - rank)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    share = (RANKS - 1) / RANKS
    seconds = {
        "all-reduce": (lambda: dist.all_reduce(data), 2 * share * data.nbytes),
        "all-to-all": (lambda: dist.all_to_all_single(other, data), share * data.nbytes),
        "link": (exchange, part.nbytes),
    }
    found = {}
    for name, (body, size) in seconds.items():
        body()
        _wait(device)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(REPEATS):
            body()
        _wait(device)
        found[name] = size / ((time.perf_counter() - began) / REPEATS) / 1e9
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def read_for_ever() -> None:
    time.sleep(600)


def hang(kind: str) -> ExitCode:
    """One rank of two, of which the second reads where the first reduces."""
    where = discover(os.environ)
    rank, local = where.rank, where.local_rank
    assert rank is not None and local is not None
    orphans.die_with_torchrun_agent()
    watchdog.show_stacks_on_request()

    def work() -> None:
        store, device = world.open_store(where, timedelta(seconds=60)), _device(kind, local)
        logs = outcomes.get_launch_folder()
        assert logs is not None
        place = world.choose_world_folder(store, rank, logs)
        outcomes.publish_world_folder_to_launcher(place, where.node_rank, local)
        patient = timedelta(seconds=compute_collective_timeout(HANG_SECONDS))
        with Watchdog(HANG_SECONDS, place, rank, local) as dog:
            with dog.extend_patience("connecting"):
                world.initialize(where, store, "gloo" if kind == "cpu" else "nccl", patient)
                for _ in range(3):
                    dist.all_reduce(torch.ones(4, device=device))
                _wait(device)
            dog.report_progress("step 4")
            if rank == 1:
                read_for_ever()
            dist.all_reduce(torch.ones(2, 3, device=device))
            _wait(device)

    return outcomes.run_and_report(rank, local, work)


def _device(kind: str, local: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(local)
    return torch.device(kind, local)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=tuple(BYTES), default="cuda")
    parser.add_argument("--rank", choices=("bare", "hang"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank == "bare":
        bare(options.kind)
    elif options.rank == "hang":
        os._exit(hang(options.kind))
    else:
        sys.exit(main(options.kind))
