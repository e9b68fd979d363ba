"""Nodes that are asked together: what their links come to, and which of them is at fault."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bundle.launch.rendezvous import discover
from bundle.preflight import nodes
from bundle.preflight.nodes import LinkWorker, ProcessReport, RankLink, judge_links, parse_link_report
from tests.command import start_bundle
from tests.launch.launched import reserved

COLLECTIVES = ("GB/s all-reduce", "GB/s all-to-all")


def between(speeds: dict[tuple[int, int], float], count: int) -> dict[int, ProcessReport]:
    """What nodes of one device report whose links have these GB/s."""
    return {
        rank: ProcessReport(
            tuple(RankLink(a, b, speed, 5.0) for (a, b), speed in speeds.items() if b == rank)
        )
        for rank in range(count)
    }


def ring(count: int, slow: set[int], speed: float = 1.0) -> dict[tuple[int, int], float]:
    """Links of all nodes to the next one and the one after, where all of `slow` nodes have another speed."""
    pairs = [(n, (n + d) % count) for n in range(count) for d in nodes.list_partner_offsets(count)]
    return {pair: speed if set(pair) & slow else 10.0 for pair in pairs}


def test_partners_are_ever_further_away():
    assert list(nodes.list_partner_offsets(1)) == []
    assert list(nodes.list_partner_offsets(2)) == [1]
    assert list(nodes.list_partner_offsets(1024)) == [1 << n for n in range(10)]


@pytest.mark.parametrize("count", [3, 4, 8])
@pytest.mark.parametrize("slow", [{0}, {2}])
def test_a_node_all_of_whose_links_are_slow_is_at_fault_and_its_partners_are_not(count, slow, messages):
    wrong = judge_links(between(ring(count, slow), count), range(10, 10 + count), 1)
    ((node, cause),) = wrong.items()
    assert {node - 10} == slow and "1 GB/s" in cause and "10" in cause
    messages(cause)


def test_nodes_that_are_alike_and_one_slow_link_between_good_nodes_are_no_fault_of_a_node():
    assert judge_links(between(ring(4, set()), 4), range(4), 1) == {}
    assert judge_links(between(ring(4, {3}, 6.0), 4), range(4), 1) == {}  # above half of what is usual
    speeds = ring(4, set()) | {(0, 1): 0.1}
    assert judge_links(between(speeds, 4), range(4), 1) == {}


def test_a_node_that_receives_fast_and_sends_slowly_is_at_fault():
    speeds = {pair: 1.0 if pair[0] == 1 else 10.0 for pair in ring(4, set())}
    assert list(judge_links(between(speeds, 4), range(4), 1)) == [1]


def test_links_within_a_node_are_not_held_against_those_between_nodes():
    within = {rank: ProcessReport((RankLink(rank ^ 1, rank, 300.0, 1.0),)) for rank in range(4)}
    across = {
        rank: ProcessReport((*within[rank].links, RankLink((rank + 2) % 4, rank, 40.0, 9.0)))
        for rank in range(4)
    }
    assert judge_links(across, range(2), 2) == {}


def silent(*waits: tuple[int, int], count: int) -> dict[int, ProcessReport]:
    """What nodes report of which (rank, other) waited for the other in vain."""
    said = {rank: ProcessReport((), "waiting for the other ranks") for rank in range(count)}
    return said | {rank: ProcessReport((), "an exchange", other) for rank, other in waits}


def test_the_node_that_is_at_one_end_of_every_silent_link_is_at_fault(messages):
    ((node, cause),) = judge_links(silent((1, 0), (2, 1), count=3), range(3), 1).items()
    assert node == 1 and "0, 2" in cause
    messages(cause)
    # Of a pair, nobody can tell: the one with the higher number, so that the other can go on.
    assert list(judge_links(silent((0, 1), (1, 0), count=2), range(2), 1)) == [1]
    ((node, cause),) = judge_links(silent((1, 0), count=2), [7], 2).items()
    assert node == 7
    messages(cause)


def test_a_node_that_says_nothing_is_at_fault_and_not_who_waited_for_it(messages):
    said = silent((0, 2), count=3)
    del said[2]
    ((node, cause),) = judge_links(said, range(3), 1).items()
    assert node == 2
    messages(cause)


def test_where_all_are_held_together_all_are_told(messages):
    said = {rank: ProcessReport((), "an all-reduce") for rank in range(2)}
    wrong = judge_links(said, range(2), 1)
    assert wrong.keys() == {0, 1} and all("all-reduce" in cause for cause in wrong.values())
    messages(wrong[0])


def test_what_is_sent_is_what_is_read():
    report = ProcessReport((RankLink(0, 1, 2.5, 3.5),), "an exchange", 4)
    assert parse_link_report(json.loads(json.dumps(report))) == report
    where = discover({}, nodes=3, node_rank=1, endpoint="h:1")
    (place,) = nodes.describe_link_workers(
        "cpu", 1, where, Path("f"), unfit="x", wait=1, seconds=2, quick=True
    )
    assert LinkWorker.from_argument(place.argument) == place and (place.address, place.port) == ("h", 1)


def test_lists_have_a_name_on_each_line(tmp_path):
    nodes.write_node_lists(tmp_path / "lists", [("gpu1", ""), ("gpu2", "its GPU failed"), ("gpu3", "")])
    assert (tmp_path / "lists/passing.txt").read_text() == "gpu1\ngpu3\n"
    assert (tmp_path / "lists/failing.txt").read_text() == "gpu2\n"


def told(does: list[str], unfit: dict[str, str], port: int) -> list[dict[str, Any]]:
    """What the probe of each of some nodes of one device finds."""
    started = []
    for number, how in enumerate(does):
        place = LinkWorker(
            kind="cpu", local_rank=0, per_node=1, nodes=len(does), node_rank=number, address="127.0.0.1",
            port=port, unfit=unfit.get(how, ""), wait=300, seconds=30, quick=True, name=f"gpu{number}",
        )  # fmt: skip
        command = [sys.executable, "-m", "tests.preflight.link", place.argument, how]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    said = [process.communicate(timeout=500)[0] for process in started]
    assert all("preflight found " in text for text in said), "\n=====".join(said)
    return [json.loads(text.partition("preflight found ")[2]) for text in said]


@pytest.mark.releases
def test_nodes_measure_each_other_without_one_that_fails_alone_and_name_one_that_is_held():
    pytest.importorskip("torch")
    with reserved() as port:
        found = told(["slow", "held", "well", "unfit", "well"], {"unfit": "its disk is full"}, port)
    came_to = {
        "0": ["gpu0", ""],
        "1": ["gpu1", "no data passed over the links between it and nodes 0, 2"],
        "2": ["gpu2", ""],
        "3": ["gpu3", "its disk is full"],
        "4": ["gpu4", ""],  # whose own exchange has ended, and which waits for those that are held
    }
    assert [each["nodes"] for each in found] == [came_to] * 5
    assert [each["wrong"] for each in found] == ["", came_to["1"][1], "", "", ""]
    assert found[3]["skipped"] and found[0]["measured"] == {}


def measuring(size: int) -> Any:
    """The measurements of the first of `size` devices, which waits for nobody."""
    links = pytest.importorskip("bundle.preflight.links")
    place = LinkWorker(
        kind="cpu", local_rank=0, per_node=size, nodes=1, node_rank=0, address="", port=0, unfit="",
        wait=1, seconds=1, quick=True, name="gpu0",
    )  # fmt: skip
    found = links.LinkMeasurer(place, 0, size, 1)
    found._wait_at_barrier = lambda: setattr(found, "stage", "waiting for the other ranks")
    return found


def test_a_call_takes_what_one_takes_after_the_first(monkeypatch):
    found, now, first = measuring(2), [0.0], [0.5]
    found.stage, found.received = "an exchange", object()
    meet = found._wait_at_barrier

    def passes(seconds: float) -> None:
        now[0] += seconds

    def meets() -> None:
        meet()
        passes(3)

    monkeypatch.setattr(found, "_wait_at_barrier", meets)
    monkeypatch.setattr("bundle.preflight.links.time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert found._time_calls(lambda: passes(first.pop() if first else 0.02), 5) == pytest.approx(0.02)
    assert (found.stage, found.received) == ("an exchange", None)
    assert now == [pytest.approx(0.5 + 3 + 5 * 0.02)]


def test_bandwidths_are_those_of_the_bus():
    found = measuring(4)
    found._time_calls = lambda body, repeats: 0.5
    found._measure_collectives()
    # As NCCL's own tests count: what each device sends and receives, of which its own part stays with it.
    reduced, exchanged = 2 * 3 / 4 * 2**22 / 0.5 / 1e9, 3 / 4 * 2**22 / 0.5 / 1e9
    assert found.measured == pytest.approx(dict(zip(COLLECTIVES, (reduced, exchanged), strict=True)))


def test_what_a_node_takes_to_set_up_a_connection_is_not_held_against_the_other_end():
    pytest.importorskip("torch")
    with reserved() as port:
        first, _ = told(["well", "late"], {}, port)
    # 5 exchanges of a MiB, which would take that second as well.
    assert first["measured"]["GB/s from gpu1"] > 2 * 5 * 2**20 / 1e9


@pytest.mark.releases
def test_two_nodes_are_asked_by_the_verb_and_leave_their_lists(tmp_path):
    pytest.importorskip("torch")
    with reserved() as port:
        words = ["preflight", "--backend=cpu", "--json", "--nodes=2", "--devices-per-node=2"]
        words += [f"--directory={tmp_path}", f"--rendezvous=127.0.0.1:{port}"]
        started = [
            start_bundle(
                *words,
                f"--node-rank={number}",
                environment={"SLURMD_NODENAME": f"gpu{number}"},
                stderr=None,
            )
            for number in range(2)
        ]
        said = [json.loads(process.communicate(timeout=500)[0]) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    for number, report in enumerate(said):
        assert report["passed"] and [each["node"] for each in report["nodes"]] == ["gpu0", "gpu1"]
        links = [each["measured"] for each in report["probes"] if each["name"].startswith("links of")]
        assert len(links) == 2
        for local, measured in enumerate(links):
            sources = (f"device {1 - local}", f"gpu{1 - number}")
            units = {f"{unit} from {source}" for unit in ("GB/s", "us") for source in sources}
            assert set(measured) == units | set(COLLECTIVES)
            assert all(value > 0 for value in measured.values())
    assert (tmp_path / "preflight/passing.txt").read_text() == "gpu0\ngpu1\n"
    assert (tmp_path / "preflight/failing.txt").read_text() == ""
