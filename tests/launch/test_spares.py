"""Nodes of which some are spare, as processes without ranks: who runs, who takes over, how all end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bundle.errors import ExitCode
from bundle.launch.causes import FailureKind, RestartAction
from bundle.launch.node_registry import Heartbeat
from bundle.launch.process import LaunchFailed
from bundle.launch.rendezvous import Rendezvous
from bundle.launch.spares import NodeRunnerWithSpares
from bundle.launch.verdict import Verdict
from tests.launch.launched import ROOT


class Node:
    """A process of tests.launch.spare."""

    def __init__(self, folder: Path, number: int, count: int, spares: int, *does: str) -> None:
        self.roster, self.count = folder / "roster", count
        words = [str(number), str(count), str(spares), str(folder), *does]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.launch.spare", *words],
            env=os.environ | {"PYTHONPATH": str(ROOT), "SLURMD_NODENAME": f"gpu{number}"},
            stdout=subprocess.PIPE,
            text=True,
        )

    def until_in_a_round(self) -> str:
        """What it says of the round, which all nodes have seen."""
        assert self.process.stdout is not None
        said = self.process.stdout.readline().strip()
        deadline = time.monotonic() + 300
        while len([beats for beats in self.beats() if beats > 3]) < self.count:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return said

    def beats(self) -> list[int]:
        signs = (Heartbeat.from_file_name(path.name) for path in self.roster.glob("beat-*"))
        return [sign.count for sign in signs if sign]

    def end(self) -> tuple[int, list[str]]:
        said, _ = self.process.communicate(timeout=300)
        return self.process.returncode, said.splitlines()


def nodes(folder: Path, spares: int, *does: str) -> list[Node]:
    """A node for each word, or words, of what it does; each is there before the next comes."""
    started = []
    for number, each in enumerate(does):
        started.append(Node(folder, number, len(does), spares, *each.split()))
        deadline = time.monotonic() + 300
        while len(list((folder / "roster").glob("node-*.json"))) <= number:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    return started


FIRST, SECOND = "round 0/2 127.0.0.1", "round 1/2 127.0.0.1"


def test_a_node_that_was_told_to_stop_after_its_ranks_begins_no_other_round(tmp_path):
    rendezvous = Rendezvous(1, 0, "127.0.0.1", 29500, "flags", "given")
    node = NodeRunnerWithSpares(rendezvous, 0, tmp_path, wait=60, most_restarts=9)
    killed = Verdict(ExitCode.JOB_FAILED, FailureKind.KILLED, "killed", RestartAction.RESTART)
    called: list[int] = []

    def start(*_: object) -> None:
        called.append(len(called))
        raise LaunchFailed(killed, is_stopped=True)

    with pytest.raises(LaunchFailed):
        node.run(start, lambda: None)
    assert len(called) == 1


def test_a_job_that_ends_well_ends_its_spare_node_too(tmp_path):
    ends = [node.end() for node in nodes(tmp_path, 1, "well", "well", "well")]
    assert ends == [(0, [f"{FIRST} False"]), (0, [f"{SECOND} False"]), (0, [])]


@pytest.mark.releases  # which waits until a node is lost
def test_a_node_that_is_killed_is_replaced_and_the_next_round_goes_on(tmp_path):
    first, second, spare = nodes(tmp_path, 1, "hang", "lost", "well")
    assert first.until_in_a_round() == f"{FIRST} False"
    first.process.kill()
    assert second.end() == (0, [f"{SECOND} False", f"{FIRST} True"])
    assert spare.end() == (0, [f"{SECOND} True"])


def test_a_node_that_is_bad_waits_for_the_others_and_ends_as_they_do(tmp_path):
    first, bad, spare = nodes(tmp_path, 1, "lost", "bad", "well")
    assert first.end() == (0, [f"{FIRST} False", f"{FIRST} True"])
    assert bad.end() == (0, [f"{SECOND} False"])
    assert spare.end() == (0, [f"{SECOND} True"])


@pytest.mark.releases  # which waits until a node is lost
def test_without_a_spare_left_the_job_ends_with_what_broke(tmp_path):
    first, second, spare = nodes(tmp_path, 1, "lost", "hang", "hang")
    assert second.until_in_a_round()
    spare.process.kill()
    second.process.kill()
    code, said = first.end()
    assert code == 1 and len(said) == 2
    verdict = json.loads(said[1])
    assert (verdict["kind"], verdict["node"]) == ("lost node", "gpu9")


@pytest.mark.releases  # which waits until a node is lost
def test_a_spare_node_takes_over_a_job_of_one_node_or_says_that_all_are_lost(tmp_path):
    first, spare = nodes(tmp_path / "one", 1, "hang", "well")
    assert first.until_in_a_round() == "round 0/1 127.0.0.1 False"
    first.process.kill()
    assert spare.end() == (0, ["round 0/1 127.0.0.1 True"])
    first, second, spare = nodes(tmp_path / "two", 1, "hang", "hang", "well")
    for each in (first, second):
        assert each.until_in_a_round()
        each.process.kill()
    code, said = spare.end()
    verdict = json.loads(said[0])
    assert (code, verdict["kind"], verdict["node"]) == (1, "lost node", "gpu0, gpu1")


def test_the_same_nodes_start_again_as_often_as_they_may_and_the_spare_ends_as_they_do(tmp_path):
    first, second, spare = nodes(tmp_path, 1, "killed killed", "killed killed", "well")
    code, said = first.end()
    assert (code, said[:2]) == (1, [f"{FIRST} False", f"{FIRST} True"])
    verdict = json.loads(said[2])
    assert (verdict["kind"], verdict["node"]) == ("killed", "gpu0")
    assert second.end()[0] == 1
    assert spare.end()[0] == 1


@pytest.mark.parametrize(("does", "code"), [("disk", 1), ("saved", 75)])
def test_what_no_restart_mends_and_a_request_to_stop_end_all_at_once(tmp_path, does, code):
    ends = [node.end() for node in nodes(tmp_path, 1, does, does, "well")]
    assert [each[0] for each in ends] == [code] * 3
    assert ends[2][1] == [ends[0][1][1]] or ends[2][1] == [ends[1][1][1]]


def test_a_spare_node_that_is_told_to_stop_ends_with_75_and_the_job_does_not(tmp_path, messages):
    every = nodes(tmp_path, 1, "held", "held", "held")
    while not (made := tmp_path / "roster/round-1.json").exists():
        time.sleep(0.02)
    members = json.loads(made.read_text())["members"]
    entries = [json.loads(path.read_text()) for path in (tmp_path / "roster").glob("node-*.json")]
    inside = {entry["number"] for entry in entries if entry["token"] in members}
    (spare,) = {0, 1, 2} - inside
    every[min(inside)].until_in_a_round()
    every[spare].process.send_signal(signal.SIGTERM)
    code, said = every[spare].end()
    (verdict,) = map(json.loads, said)
    messages(verdict["sentence"])
    assert (code, verdict["kind"], verdict["node"]) == (75, "preempted", f"gpu{spare}")
    (tmp_path / "go").touch()
    assert [every[number].end()[0] for number in inside] == [0, 0]


def test_before_all_are_there_a_signal_ends_and_so_does_too_long_a_wait(tmp_path, monkeypatch):
    (first,) = [Node(tmp_path / "a", 0, 3, 1)]
    while not (tmp_path / "a/roster").exists():
        time.sleep(0.02)
    time.sleep(0.5)
    first.process.send_signal(signal.SIGTERM)
    assert first.end()[0] == 143
    monkeypatch.setenv("TEST_WAIT", "1")
    code, said = Node(tmp_path / "b", 0, 3, 1).end()
    verdict = json.loads(said[0])
    assert (code, verdict["kind"], verdict["node"]) == (5, "launch", "gpu0")
    assert f"{tmp_path}/b/roster" in verdict["cause"]


def test_a_node_that_is_not_fit_is_spare_and_too_few_are_refused(tmp_path, messages):
    one, unfit, two = nodes(tmp_path / "a", 1, "well", "unfit", "well")
    assert one.end() == (0, [f"{FIRST} False"]) and two.end() == (0, [f"{SECOND} False"])
    assert unfit.end() == (0, [])
    for node in nodes(tmp_path / "b", 1, "well", "unfit", "unfit"):
        code, said = node.end()
        (verdict,) = map(json.loads, said)
        assert (code, verdict["kind"], verdict["action"]) == (3, "refused", "stop")
    messages(verdict["cause"])
    assert "gpu1" in verdict["cause"] and "gpu2" in verdict["cause"]


def test_the_next_start_of_all_nodes_begins_at_once_where_the_last_one_ended(tmp_path):
    assert [node.end()[0] for node in nodes(tmp_path, 1, "saved", "saved", "well")] == [75] * 3
    again = [Node(tmp_path, number, 3, 1, "well") for number in range(3)]
    ends = [node.end() for node in again]
    assert [code for code, _ in ends] == [0, 0, 0]
    assert sorted(said for _, said in ends if said) == [[f"{FIRST} False"], [f"{SECOND} False"]]
