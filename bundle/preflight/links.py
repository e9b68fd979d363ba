"""The speed of the links between devices, within and between nodes: `python -m bundle.preflight.links PLACE`.

Each device has a process. The processes meet in a store, exchange data in pairs, and then run collectives. A
process that a dead link blocks reports from another thread when its time is over.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore

from bundle.preflight import ProbeResult
from bundle.preflight.nodes import (
    LinkWorker,
    ProcessReport,
    RankLink,
    judge_links,
    list_partner_offsets,
    parse_link_report,
)

_COLLECTIVE_BACKENDS = {"cuda": "nccl", "npu": "hccl"}
# Bytes of a reduction; a link carries a quarter of them. They are enough to measure the bandwidth.
_REDUCTION_BYTES_BY_KIND = {"cpu": {True: 1 << 22, False: 1 << 24}}
_ACCELERATOR_REDUCTION_BYTES_BY_QUICK = {True: 1 << 28, False: 1 << 30}
_REPEATS, _PINGS = 5, 20
_POLL_SECONDS = 0.2


class LinkMeasurer:
    """The measurements of one process with the rank `rank` of `size`; `stage` is its current step."""

    def __init__(self, worker: LinkWorker, rank: int, size: int, node_count: int) -> None:
        self.worker, self.rank, self.size = worker, rank, size
        self.node_count = node_count
        self.device = (
            torch.device(worker.kind)
            if worker.kind == "cpu"
            else torch.device(worker.kind, worker.local_rank)
        )
        self.bytes = _REDUCTION_BYTES_BY_KIND.get(worker.kind, _ACCELERATOR_REDUCTION_BYTES_BY_QUICK)[
            worker.quick
        ]
        self.links: list[RankLink] = []
        self.stage = "meeting the other ranks"
        # The received data of the first exchange with a partner, and the ranks of the exchange.
        self.received: torch.Tensor | None = None
        self.source = self.target = rank
        self.measured: dict[str, float] = {}

    def build_report(self) -> ProcessReport:
        """Return the report of the measurements so far."""
        return ProcessReport(tuple(self.links), self.stage, self._find_awaited_rank())

    def _find_awaited_rank(self) -> int | None:
        """Return the rank that blocks an exchange: the sender until its data arrived, then the receiver."""
        if self.received is None:
            return None
        # On another stream, as a blocked exchange holds the default one.
        with contextlib.nullcontext() if self.device.type == "cpu" else self._open_side_stream():
            arrived = self.received[-1].item() == self.source
        return self.target if arrived else self.source

    def _open_side_stream(self) -> contextlib.AbstractContextManager[None]:
        module = getattr(torch, self.device.type)
        stream: contextlib.AbstractContextManager[None] = module.stream(module.Stream(self.device))
        return stream

    def measure_links_and_collectives(self) -> None:
        """Measure links within the node and between nodes, then collectives of all ranks."""
        per_node = self.worker.per_node
        node, local = divmod(self.rank, per_node)
        if per_node > 1:
            ahead, behind = ((local + step) % per_node for step in (1, -1))
            self._measure_simultaneous_send_receive(node * per_node + ahead, node * per_node + behind)
        for distance in list_partner_offsets(self.node_count):
            ahead, behind = ((node + step) % self.node_count for step in (distance, -distance))
            self._measure_simultaneous_send_receive(ahead * per_node + local, behind * per_node + local)
        self._measure_collectives()
        self.stage = ""

    def _measure_simultaneous_send_receive(self, target: int, source: int) -> None:
        """Measure a link while every rank sends to one rank and receives from one at the same time."""
        self._wait_at_barrier()
        self.stage, self.source, self.target = "an exchange", source, target
        large = torch.full((self.bytes // 16,), float(self.rank), device=self.device)
        small = torch.full((1,), float(self.rank), device=self.device)
        seconds = self._time_exchange(large, target, source, _REPEATS)
        latency = self._time_exchange(small, target, source, _PINGS)
        self.links.append(RankLink(source, self.rank, large.nbytes / seconds / 1e9, 1e6 * latency))

    def _time_exchange(self, data: torch.Tensor, target: int, source: int, repeats: int) -> float:
        """Return the duration of one exchange [s]. Raise ValueError where the received data is wrong."""
        received = self.received = torch.full_like(data, float("nan"))

        def exchange() -> None:
            operations = [dist.P2POp(dist.isend, data, target), dist.P2POp(dist.irecv, received, source)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        seconds = self._time_calls(exchange, repeats)
        if not bool((received == float(source)).all()):
            raise ValueError(f"data from rank {source} arrived damaged")
        return seconds

    def _measure_collectives(self) -> None:
        if self.size == 1:
            return
        self._wait_at_barrier()
        self.stage = "an all-reduce"
        data = torch.ones(self.bytes // 4, device=self.device)
        seconds = self._time_calls(lambda: dist.all_reduce(data), _REPEATS)
        share = (self.size - 1) / self.size
        self.measured["GB/s all-reduce"] = 2 * share * data.nbytes / seconds / 1e9
        self._wait_at_barrier()
        self.stage = "an all-to-all"
        parts = torch.ones(self.bytes // 4 // self.size * self.size, device=self.device)
        exchanged = torch.empty_like(parts)
        seconds = self._time_calls(lambda: dist.all_to_all_single(exchanged, parts), _REPEATS)
        self.measured["GB/s all-to-all"] = share * parts.nbytes / seconds / 1e9

    def _wait_at_barrier(self) -> None:
        self.stage = "waiting for the other ranks"
        dist.barrier(device_ids=None if self.device.type == "cpu" else [self.worker.local_rank])

    def _time_calls(self, body: Callable[[], object], repeats: int) -> float:
        """Return the duration of one call of all ranks [s].

        The first call, which sets up connections, is not counted.
        """
        body()
        self._wait_for_device()
        stage, self.received = self.stage, None
        self._wait_at_barrier()
        self.stage = stage
        began = time.perf_counter()
        for _ in range(repeats):
            body()
        self._wait_for_device()
        return (time.perf_counter() - began) / repeats

    def _wait_for_device(self) -> None:
        if self.device.type != "cpu":
            getattr(torch, self.device.type).synchronize(self.device)


class LinkStore:
    """The store where the processes of all nodes meet; the first process of node 0 serves it and judges."""

    def __init__(self, worker: LinkWorker) -> None:
        self.worker, self.is_first = worker, worker.node_rank == 0 and worker.local_rank == 0
        self.store = self._connect(is_server=self.is_first)
        if worker.local_rank == 0:
            self.store.set(f"node/{worker.node_rank}", json.dumps([worker.name, worker.unfit]))
        self.deadline = time.monotonic() + worker.wait

    def _connect(self, *, is_server: bool = False) -> Store:
        worker, timeout = self.worker, timedelta(seconds=self.worker.wait + 2 * self.worker.seconds)
        if worker.nodes > 1:
            return TCPStore(
                worker.address, worker.port, is_master=is_server, timeout=timeout, wait_for_workers=False
            )
        store = FileStore(worker.address, worker.per_node)
        store.set_timeout(timeout)
        return store

    def open_group_store(self) -> Store:
        """Return the store for process groups, on a connection of its own, as a waiting one is blocked."""
        return PrefixStore("links", self._connect())

    def wait_for_fit_nodes(self) -> list[int]:
        """Return the nodes that came in time without a defect of their own, as node 0 has seen them."""
        if self.is_first:
            while (
                len(arrivals := self._read_node_names_and_defects()) < self.worker.nodes
                and time.monotonic() < self.deadline
            ):
                time.sleep(_POLL_SECONDS)
            self.store.set(
                "taking part", json.dumps([number for number, (_, unfit) in arrivals.items() if not unfit])
            )
        participants: list[int] = json.loads(self.store.get("taking part"))
        return participants

    def write_report(self, rank: int, report: ProcessReport) -> None:
        """Write the report of this process to the store."""
        self.store.set(f"report/{rank}", json.dumps(report))

    def collect_node_names_and_defects(self, participants: list[int]) -> dict[int, tuple[str, str]]:
        """Return the name and the defect of every node, by its number; the defect of a good node is empty."""
        worker = self.worker
        if self.is_first:
            ranks = range(len(participants) * worker.per_node)
            limit = time.monotonic() + worker.seconds
            while not all(self.store.check([f"report/{r}"]) for r in ranks) and time.monotonic() < limit:
                time.sleep(_POLL_SECONDS)
            reported = [rank for rank in ranks if self.store.check([f"report/{rank}"])]
            reports = {
                rank: parse_link_report(json.loads(self.store.get(f"report/{rank}"))) for rank in reported
            }
            wrong, arrivals = (
                judge_links(reports, participants, worker.per_node),
                self._read_node_names_and_defects(),
            )
            for number in range(worker.nodes):
                if number not in arrivals:
                    arrivals[number] = f"node {number}", f"did not arrive within {worker.wait:.0f} s"
                elif not arrivals[number][1]:
                    arrivals[number] = arrivals[number][0], wrong.get(number, "")
            self.store.set("result", json.dumps(sorted(arrivals.items())))
        defects = {number: (name, defect) for number, (name, defect) in json.loads(self.store.get("result"))}
        if not self.is_first:
            self.store.add("read", 1)
        elif worker.nodes > 1:  # this process serves the store
            readers, limit = (
                worker.per_node * len(self._read_node_names_and_defects()) - 1,
                time.monotonic() + worker.seconds,
            )
            while self.store.add("read", 0) < readers and time.monotonic() < limit:
                time.sleep(_POLL_SECONDS)
        return defects

    def _read_node_names_and_defects(self) -> dict[int, tuple[str, str]]:
        numbers = [number for number in range(self.worker.nodes) if self.store.check([f"node/{number}"])]
        return {number: tuple(json.loads(self.store.get(f"node/{number}"))) for number in numbers}


def probe(worker: LinkWorker) -> ProbeResult:
    """Measure the links together with the other processes; the defects are the same on every node."""
    link_store = LinkStore(worker)
    participants = link_store.wait_for_fit_nodes()
    if worker.node_rank not in participants:
        return _build_result(link_store, participants, None)
    rank = participants.index(worker.node_rank) * worker.per_node + worker.local_rank
    size = len(participants) * worker.per_node
    measurement = LinkMeasurer(worker, rank, size, len(participants))
    end_lock = threading.Lock()

    def report_and_exit() -> None:
        with end_lock:
            link_store.write_report(rank, measurement.build_report())
            _build_result(link_store, participants, measurement).print_result()
            sys.stdout.flush()
            os._exit(0)

    # A process that a link blocks runs no Python code, so an exception cannot end it.
    timer = threading.Timer(worker.seconds, report_and_exit)
    timer.daemon = True
    timer.start()
    if worker.kind == "cuda":
        torch.cuda.set_device(worker.local_rank)
    dist.init_process_group(
        _COLLECTIVE_BACKENDS.get(worker.kind, "gloo"),
        store=link_store.open_group_store(),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=2 * worker.seconds),
        device_id=measurement.device if worker.kind == "cuda" else None,
    )
    try:
        measurement.measure_links_and_collectives()
    except Exception:
        with end_lock:  # after the time limit, the end of other processes causes errors here
            timer.cancel()
        raise
    with end_lock:
        timer.cancel()
        link_store.write_report(rank, measurement.build_report())
        return _build_result(link_store, participants, measurement)


def _build_result(
    link_store: LinkStore, participants: list[int], measurement: LinkMeasurer | None
) -> ProbeResult:
    worker, node_defects = link_store.worker, link_store.collect_node_names_and_defects(participants)
    wrong = node_defects[worker.node_rank][1]
    if measurement is None:
        return ProbeResult(skipped="not measured: this node also fails alone", nodes=node_defects)
    numbers = [number for number in participants for _ in range(worker.per_node)]
    measured = dict(measurement.measured)
    for link in measurement.links:
        other, local = numbers[link.source], link.source % worker.per_node
        source = f"device {local}" if other == worker.node_rank else node_defects[other][0]
        measured |= {f"GB/s from {source}": link.bandwidth, f"us from {source}": link.latency}
    return ProbeResult(measured, wrong, nodes=node_defects)


if __name__ == "__main__":
    probe(LinkWorker.from_argument(sys.argv[1])).print_result()
    sys.stdout.flush()
    # Without all of its ranks, a process group may block an orderly exit.
    os._exit(0)
