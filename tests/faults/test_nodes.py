"""Runs of two nodes, which this machine stands for, without a scheduler."""

import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import Popen

import pytest

from tests.command import finish, start_training
from tests.faults.harness import RECIPE, SECONDS, find_processes, has_checkpoint, wait_for
from tests.launch.launched import reserved
from tests.launch.test_network import HAS_NAMESPACES, forward
from tests.training.verdicts import find_resumed_steps, read_verdict

pytestmark = pytest.mark.faults
Start = Callable[..., list[Popen[str]]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start both nodes, gpu0 and gpu1, which meet at a port."""
    started: list[Popen[str]] = []

    def start_nodes(
        port: int, address: str = "127.0.0.1", within: Sequence[Sequence[str]] = ((), ())
    ) -> list[Popen[str]]:
        recipe = (*RECIPE, "distributed.timeout_seconds=40")
        for number in range(2):
            monkeypatch.setenv("SLURMD_NODENAME", f"gpu{number}")
            place = (f"--node-rank={number}", f"--rendezvous={address}:{port}")
            flags = ("--nodes=2", "--devices-per-node=1", *place)
            started.append(start_training("demo", tmp_path / "run", recipe, *flags, within=within[number]))
        return started[-2:]

    yield start_nodes
    for process in started:
        process.kill()


def test_a_taken_port_ends_both_nodes_and_the_next_start_trains(faults, whole, start, tmp_path):
    directory = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        printed = [finish(node, 5, SECONDS) for node in start(taken.getsockname()[1])]
    processes = find_processes(tmp_path)
    verdicts = [read_verdict(directory, node) for node in range(2)]
    for verdict, text in zip(verdicts, printed, strict=True):
        assert (verdict["kind"], verdict["code"]) == ("launch", 5) and verdict["sentence"] in text
    assert verdicts[0]["cause"] in verdicts[1]["cause"] and "gpu0" in verdicts[1]["cause"]
    with reserved() as port:
        for node in start(port):
            finish(node, timeout=SECONDS)
    faults.check(
        *("local, two nodes", "the port where the nodes meet is taken"),
        verdict=verdicts[0], processes=processes,
        metrics=directory / "metrics.jsonl", whole=whole,
    )  # fmt: skip


def test_a_lost_node_is_named_and_both_go_on_when_they_start_again(faults, whole, start, tmp_path):
    directory = tmp_path / "run"
    with reserved() as port:
        first, second = start(port)
        wait_for(lambda: has_checkpoint(directory), first, second)
        second.kill()  # its agent and its rank end with it
        second.communicate()
        printed = finish(first, 1, SECONDS)
    processes = find_processes(tmp_path)
    verdict = read_verdict(directory)
    assert (verdict["kind"], verdict["node"]) == ("lost node", "gpu1") and verdict["sentence"] in printed
    with reserved() as port:
        assert find_resumed_steps("".join(finish(node, timeout=SECONDS) for node in start(port)))
    faults.check(
        *("local, two nodes", "the launcher of a node is killed, and all its ranks with it"),
        verdict=verdict, processes=processes,
        metrics=directory / "metrics.jsonl", whole=whole,
    )  # fmt: skip


@pytest.mark.skipif(not HAS_NAMESPACES, reason="needs root, and ip")
def test_a_cut_network_is_named_and_both_nodes_go_on_when_it_is_back(
    faults, whole, start, routed, tmp_path, monkeypatch
):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # the name of this machine is an address of loopback
    directory, router = tmp_path / "run", routed[2]
    within = [("ip", "netns", "exec", name) for name in routed[:2]]
    nodes = start(29400, "10.213.0.2", within)
    wait_for(lambda: has_checkpoint(directory), *nodes)
    forward(router, 0)
    printed = [finish(node, 6, SECONDS) for node in nodes]
    processes = find_processes(tmp_path)
    verdicts = [read_verdict(directory, node) for node in range(2)]
    for verdict, text in zip(verdicts, printed, strict=True):
        assert (verdict["kind"], verdict["node"], verdict["action"]) == ("network", "gpu0, gpu1", "restart")
        assert verdict["sentence"] in text
    forward(router, 1)
    resumed = start(29401, "10.213.0.2", within)
    assert find_resumed_steps("".join(finish(node, timeout=SECONDS) for node in resumed))
    faults.check(
        *("local, two nodes", "the network between the nodes is cut"),
        verdict=verdicts[0], processes=processes,
        metrics=directory / "metrics.jsonl", whole=whole,
    )  # fmt: skip
