"""What the links of devices carry, of one node or of several: `python -m bundle.preflight.links PLACE`.

A process for each device: they meet in a store, send to each other in pairs, and then act all together.
One that is held by a dead link tells where, from a thread of its own, when its time is over.
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

from bundle.preflight import Found
from bundle.preflight.nodes import Link, Place, Report, distances, judged, parsed

_COLLECTIVES = {"cuda": "nccl", "npu": "hccl"}
# Bytes that are reduced, and a quarter of which a link carries: as large as a bandwidth needs to be seen.
_BYTES = {"cpu": {True: 1 << 22, False: 1 << 24}}
_BYTES_OF_DEVICES = {True: 1 << 28, False: 1 << 30}
_REPEATS, _PINGS = 5, 20
_LOOK_SECONDS = 0.2


class Measuring:
    """The measurements of one process, of rank `rank` of `size`; says at what it is, for who waits for it."""

    def __init__(self, place: Place, rank: int, size: int, taking_part: int) -> None:
        self.place, self.rank, self.size = place, rank, size
        self.nodes = taking_part
        self.device = (
            torch.device(place.kind) if place.kind == "cpu" else torch.device(place.kind, place.local_rank)
        )
        self.bytes = _BYTES.get(place.kind, _BYTES_OF_DEVICES)[place.quick]
        self.links: list[Link] = []
        self.stage = "meeting the others"
        # What is received in the first exchange with somebody, and with whom that is.
        self.came: torch.Tensor | None = None
        self.source = self.target = rank
        self.measured: dict[str, float] = {}

    def report(self) -> Report:
        """What there is to say so far."""
        return Report(tuple(self.links), self.stage, self._waits_for())

    def _waits_for(self) -> int | None:
        """Who keeps it in an exchange: who sends, unless that has arrived; then who takes nothing."""
        if self.came is None:
            return None
        # Beside what is held on the device.
        with contextlib.nullcontext() if self.device.type == "cpu" else self._beside():
            arrived = self.came[-1].item() == self.source
        return self.target if arrived else self.source

    def _beside(self) -> contextlib.AbstractContextManager[None]:
        module = getattr(torch, self.device.type)
        stream: contextlib.AbstractContextManager[None] = module.stream(module.Stream(self.device))
        return stream

    def all(self) -> None:
        """Links within the node and between nodes, then what all do together."""
        per_node = self.place.per_node
        node, local = divmod(self.rank, per_node)
        if per_node > 1:
            ahead, behind = ((local + step) % per_node for step in (1, -1))
            self._link(node * per_node + ahead, node * per_node + behind)
        for distance in distances(self.nodes):
            ahead, behind = ((node + step) % self.nodes for step in (distance, -distance))
            self._link(ahead * per_node + local, behind * per_node + local)
        self._together()
        self.stage = ""

    def _link(self, target: int, source: int) -> None:
        """Every rank sends to one and receives from one at the same time."""
        self._meet()
        self.stage, self.source, self.target = "an exchange", source, target
        large = torch.full((self.bytes // 16,), float(self.rank), device=self.device)
        small = torch.full((1,), float(self.rank), device=self.device)
        seconds = self._exchanged(large, target, source, _REPEATS)
        latency = self._exchanged(small, target, source, _PINGS)
        self.links.append(Link(source, self.rank, large.nbytes / seconds / 1e9, 1e6 * latency))

    def _exchanged(self, data: torch.Tensor, target: int, source: int, repeats: int) -> float:
        """Seconds of one exchange. Raises ValueError where what comes is not what was sent."""
        came = self.came = torch.full_like(data, float("nan"))

        def exchange() -> None:
            sent = [dist.P2POp(dist.isend, data, target), dist.P2POp(dist.irecv, came, source)]
            for work in dist.batch_isend_irecv(sent):
                work.wait()

        seconds = self._timed(exchange, repeats)
        if not bool((came == float(source)).all()):
            raise ValueError(f"rank {source} sent what did not arrive as it was")
        return seconds

    def _together(self) -> None:
        if self.size == 1:
            return
        self._meet()
        self.stage = "an all-reduce"
        data = torch.ones(self.bytes // 4, device=self.device)
        seconds = self._timed(lambda: dist.all_reduce(data), _REPEATS)
        share = (self.size - 1) / self.size
        self.measured["GB/s all-reduce"] = 2 * share * data.nbytes / seconds / 1e9
        self._meet()
        self.stage = "an all-to-all"
        parts = torch.ones(self.bytes // 4 // self.size * self.size, device=self.device)
        exchanged = torch.empty_like(parts)
        seconds = self._timed(lambda: dist.all_to_all_single(exchanged, parts), _REPEATS)
        self.measured["GB/s all-to-all"] = share * parts.nbytes / seconds / 1e9

    def _meet(self) -> None:
        self.stage = "waiting for the others"
        dist.barrier(device_ids=None if self.device.type == "cpu" else [self.place.local_rank])

    def _timed(self, body: Callable[[], object], repeats: int) -> float:
        """Seconds of one call when all call it; the first one, that sets up connections, is not counted."""
        body()
        self._wait()
        stage, self.came = self.stage, None
        self._meet()
        self.stage = stage
        began = time.perf_counter()
        for _ in range(repeats):
            body()
        self._wait()
        return (time.perf_counter() - began) / repeats

    def _wait(self) -> None:
        if self.device.type != "cpu":
            getattr(torch, self.device.type).synchronize(self.device)


class Meeting:
    """The store where the processes of all nodes meet; that of node 0's first device serves it and judges."""

    def __init__(self, place: Place) -> None:
        self.place, self.first = place, place.node_rank == 0 and place.local_rank == 0
        self.store = self._connected(serves=self.first)
        if place.local_rank == 0:
            self.store.set(f"node/{place.node_rank}", json.dumps([place.name, place.unfit]))
        self.deadline = time.monotonic() + place.wait

    def _connected(self, *, serves: bool = False) -> Store:
        place, timeout = self.place, timedelta(seconds=self.place.wait + 2 * self.place.seconds)
        if place.nodes > 1:
            return TCPStore(
                place.address, place.port, is_master=serves, timeout=timeout, wait_for_workers=False
            )
        store = FileStore(place.address, place.per_node)
        store.set_timeout(timeout)
        return store

    def groups(self) -> Store:
        """Where process groups meet, by a connection of its own: one that waits lets nobody else speak."""
        return PrefixStore("links", self._connected())

    def taking_part(self) -> list[int]:
        """The nodes that came in time and found nothing wrong with themselves, as node 0 has seen it."""
        if self.first:
            while len(came := self._came()) < self.place.nodes and time.monotonic() < self.deadline:
                time.sleep(_LOOK_SECONDS)
            self.store.set(
                "taking part", json.dumps([number for number, (_, unfit) in came.items() if not unfit])
            )
        found: list[int] = json.loads(self.store.get("taking part"))
        return found

    def say(self, rank: int, report: Report) -> None:
        """Puts down what this process measured."""
        self.store.set(f"report/{rank}", json.dumps(report))

    def result(self, taking_part: list[int]) -> dict[int, tuple[str, str]]:
        """The name of every node and what is wrong with it, by number; nothing with those that pass."""
        place = self.place
        if self.first:
            ranks = range(len(taking_part) * place.per_node)
            limit = time.monotonic() + place.seconds
            while not all(self.store.check([f"report/{r}"]) for r in ranks) and time.monotonic() < limit:
                time.sleep(_LOOK_SECONDS)
            there = [rank for rank in ranks if self.store.check([f"report/{rank}"])]
            said = {rank: parsed(json.loads(self.store.get(f"report/{rank}"))) for rank in there}
            wrong, came = judged(said, taking_part, place.per_node), self._came()
            for number in range(place.nodes):
                if number not in came:
                    came[number] = f"node {number}", f"did not come within {place.wait:.0f} s"
                elif not came[number][1]:
                    came[number] = came[number][0], wrong.get(number, "")
            self.store.set("result", json.dumps(sorted(came.items())))
        found = {number: (name, why) for number, (name, why) in json.loads(self.store.get("result"))}
        if not self.first:
            self.store.add("read", 1)
        elif place.nodes > 1:  # it serves the store
            others, limit = place.per_node * len(self._came()) - 1, time.monotonic() + place.seconds
            while self.store.add("read", 0) < others and time.monotonic() < limit:
                time.sleep(_LOOK_SECONDS)
        return found

    def _came(self) -> dict[int, tuple[str, str]]:
        numbers = [number for number in range(self.place.nodes) if self.store.check([f"node/{number}"])]
        return {number: tuple(json.loads(self.store.get(f"node/{number}"))) for number in numbers}


def probe(place: Place) -> Found:
    """Measures with the others; what comes of it is the same on every node."""
    meeting = Meeting(place)
    taking_part = meeting.taking_part()
    if place.node_rank not in taking_part:
        return _found(meeting, taking_part, None)
    rank = taking_part.index(place.node_rank) * place.per_node + place.local_rank
    size = len(taking_part) * place.per_node
    measuring = Measuring(place, rank, size, len(taking_part))
    ended = threading.Lock()

    def late() -> None:
        with ended:
            meeting.say(rank, measuring.report())
            _found(meeting, taking_part, measuring).tell()
            sys.stdout.flush()
            os._exit(0)

    # What is held by a link runs no Python in which an exception could be raised.
    timer = threading.Timer(place.seconds, late)
    timer.daemon = True
    timer.start()
    if place.kind == "cuda":
        torch.cuda.set_device(place.local_rank)
    dist.init_process_group(
        _COLLECTIVES.get(place.kind, "gloo"),
        store=meeting.groups(),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=2 * place.seconds),
        device_id=measuring.device if place.kind == "cuda" else None,
    )
    try:
        measuring.all()
    except Exception:
        with ended:  # where time was over, others that have told end before us, and their links with them
            timer.cancel()
        raise
    with ended:
        timer.cancel()
        meeting.say(rank, measuring.report())
        return _found(meeting, taking_part, measuring)


def _found(meeting: Meeting, taking_part: list[int], measuring: Measuring | None) -> Found:
    place, came_to = meeting.place, meeting.result(taking_part)
    wrong = came_to[place.node_rank][1]
    if measuring is None:
        return Found(skipped="not measured: this node fails alone", nodes=came_to)
    numbers = [number for number in taking_part for _ in range(place.per_node)]
    measured = dict(measuring.measured)
    for link in measuring.links:
        other, local = numbers[link.source], link.source % place.per_node
        source = f"device {local}" if other == place.node_rank else came_to[other][0]
        measured |= {f"GB/s from {source}": link.bandwidth, f"us from {source}": link.latency}
    return Found(measured, wrong, nodes=came_to)


if __name__ == "__main__":
    probe(Place.parse(sys.argv[1])).tell()
    sys.stdout.flush()
    # A group whose ranks are not all left may not let go of a process in order.
    os._exit(0)
