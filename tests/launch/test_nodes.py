import json
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from bundle import log
from bundle.errors import ExitCode
from bundle.launch import nodes, outcomes
from bundle.launch.causes import FailureKind
from bundle.launch.process import RendezvousWait
from bundle.launch.rendezvous import discover
from bundle.launch.verdict import Verdict
from tests.launch.launched import finish, gone, read_verdict, reserved, start

WORKER = "tests.launch.worker"


def waiting_node(folder: Path, monkeypatch: pytest.MonkeyPatch, node: int, wait: int) -> subprocess.Popen:
    """A node of two that has started to wait for the other."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, value in {
        "PET_NNODES": "2",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
        "PET_NODE_RANK": str(node),
        "TEST_WAIT": str(wait),
    }.items():
        monkeypatch.setenv(name, value)
    starter = start(folder, WORKER, "well")
    deadline = time.monotonic() + 60
    agent = folder / "logs" / outcomes.AGENT_PID_FILE
    while not (agent.exists() and agent.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return starter


@pytest.mark.world
@pytest.mark.parametrize(
    ("node", "number", "code"), [(0, signal.SIGTERM, 143), (1, signal.SIGTERM, 143), (1, signal.SIGINT, 130)]
)
def test_a_node_that_waits_for_others_ends_on_the_first_signal(tmp_path, monkeypatch, node, number, code):
    starter = waiting_node(tmp_path, monkeypatch, node, 600)
    agent = int((tmp_path / "logs" / outcomes.AGENT_PID_FILE).read_text())
    starter.send_signal(number)
    finish(starter, code, 20)
    assert gone([agent])


@pytest.mark.world
def test_a_node_waits_no_longer_than_it_may_and_says_for_whom(tmp_path, monkeypatch):
    _, err = finish(waiting_node(tmp_path, monkeypatch, 1, 3), 5, 60)
    verdict = read_verdict(tmp_path)
    assert err.splitlines()[-1] == verdict["sentence"]
    assert (verdict["kind"], verdict["action"], verdict["node_rank"]) == ("launch", "restart", 1)
    assert "127.0.0.1:" in verdict["cause"] and "3 s" in verdict["cause"]


@pytest.mark.world
def test_a_node_that_fails_before_the_nodes_meet_ends_those_that_wait_for_it(tmp_path, monkeypatch):
    earlier = Verdict(ExitCode.LAUNCH_UNAVAILABLE, FailureKind.LAUNCH, "of another launch", node="x").dump()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "failed-start.json").write_text(json.dumps(earlier))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("PET_NNODES", "2")
        monkeypatch.setenv("PET_MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("PET_MASTER_PORT", str(taken.getsockname()[1]))
        starters = []
        for node in (1, 0):
            monkeypatch.setenv("PET_NODE_RANK", str(node))
            starters.append(start(tmp_path, WORKER, "well", logs=f"logs/node-{node}/1"))
        waiting, failed = starters
        finish(failed, 5, 60)
        began = time.monotonic()
        _, err = finish(waiting, 5, 60)
    assert time.monotonic() - began < 10
    first, second = (json.loads((tmp_path / f"logs/node-{n}/1/verdict.json").read_text()) for n in (0, 1))
    assert first["cause"] in second["cause"] and first["node"] in second["cause"]
    assert (second["kind"], second["code"], second["node_rank"]) == ("launch", 5, 1)
    assert err.splitlines()[-1] == second["sentence"]


@pytest.mark.parametrize(("port", "is_ours"), [(29500, True), (29501, False)])
def test_a_node_that_fails_in_another_launch_of_the_run_ends_nobody(tmp_path, monkeypatch, port, is_ours):
    seconds = iter(range(0, 100, 10))
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    folder = tmp_path / "logs" / "node-1" / "1"
    folder.mkdir(parents=True)
    starts = nodes.PeerStartFailurePoller(folder, discover({}, nodes=2, node_rank=1, endpoint="node0:29500"))
    assert starts.poll() == ""
    refusal = Verdict(ExitCode.USAGE, FailureKind.REFUSED, "another run is using it", node="gpu7")
    nodes.write_failed_start_verdict(
        folder, discover({}, nodes=2, node_rank=0, endpoint=f"gpu7:{port}"), refusal
    )
    assert ("gpu7" in starts.poll(), bool(starts.cause)) == (is_ours, is_ours)


def test_the_wait_is_told_at_intervals_that_double(tmp_path, monkeypatch, capsys):
    log.start()
    seconds = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: seconds)
    where = discover({}, nodes=3, node_rank=1, endpoint="node0:29500")
    waiting, said = RendezvousWait(where, tmp_path, 1800), []
    for tick in range(3600):
        seconds = tick / 2
        waiting.log_missing_nodes_if_due()
        said += [seconds] if "node 1 of 3" in capsys.readouterr().err else []
    assert said == [10.5, 20.5, 40.5, 80.5, 160.5, 320.5, 640.5, 1280.5]
    assert not waiting.find_abort_reason() and not waiting.has_met_all_nodes
    seconds = 1801.0
    assert "node 1 of 3" in waiting.find_abort_reason()
    (tmp_path / "x" / "attempt_0").mkdir(parents=True)
    assert waiting.has_met_all_nodes and not waiting.find_abort_reason()
    assert RendezvousWait(discover({}), tmp_path / "none", 0).has_met_all_nodes


@pytest.mark.world
def test_two_nodes_are_one_world_numbered_node_by_node(tmp_path, monkeypatch):
    nodes = []
    with reserved() as port:
        monkeypatch.setenv("PET_NNODES", "2")
        monkeypatch.setenv("PET_MASTER_ADDR", "localhost")
        monkeypatch.setenv("PET_MASTER_PORT", str(port))
        # The second node first: nothing promises that the one where they meet is there already.
        for node in (1, 0):
            folder = tmp_path / str(node)
            folder.mkdir()
            monkeypatch.setenv("PET_NODE_RANK", str(node))
            nodes.append(start(folder, "tests.launch.worker", "well"))
        # What a node that waits says on stderr depends on how long the other takes to start.
        assert [finish(node, 0)[0] for node in nodes] == [
            "[1/2] rank 2 of 4 []\n",
            "[0/0] rank 0 of 4 []\n",
        ]
