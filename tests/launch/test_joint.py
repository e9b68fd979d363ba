"""One verdict for several nodes, each of which has a word of its own, or none."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from bundle.errors import ExitCode
from bundle.launch import nodes, outcomes
from bundle.launch.causes import FailureKind, RestartAction
from bundle.launch.rendezvous import Rendezvous
from bundle.launch.verdict import Verdict
from tests.launch.launched import asked, finish, gone, read_verdict, reserved, start

NAMES = {0: "gpu07", 1: "gpu08", 2: "gpu09"}


def word(
    node: int,
    kind: FailureKind,
    cause: str,
    action: RestartAction = RestartAction.RESTART,
    code: ExitCode = ExitCode.JOB_FAILED,
) -> Verdict:
    return Verdict(code, kind, cause, action, rank=8 * node, node=NAMES[node], node_rank=node, nodes=3)


ECHO = word(0, FailureKind.ECHO, "lost its connection to another rank")
KILLED = word(2, FailureKind.KILLED, "killed by SIGKILL")


def test_a_node_that_lost_its_connection_says_what_the_node_says_that_broke(messages):
    said = {0: ECHO, 1: word(1, FailureKind.NETWORK, "the network failed"), 2: KILLED}
    assert nodes.choose_common_verdict(ECHO, said, NAMES, waited=None) is KILLED
    messages(KILLED.sentence)


def test_what_no_restart_mends_waits_for_nobody_and_what_one_may_for_all_that_run():
    full = word(2, FailureKind.DISK, "its disk is full", RestartAction.STOP)
    assert nodes.choose_common_verdict(ECHO, {0: ECHO, 2: full}, NAMES, waited=None) is full
    for own in (ECHO, KILLED):
        assert nodes.choose_common_verdict(own, {0: ECHO, 2: KILLED}, NAMES, waited=None) is None
        found = nodes.choose_common_verdict(own, {0: ECHO, 2: KILLED}, NAMES, waited=20)
        assert found == replace(KILLED, silent=("gpu08",)) and found.sentence == KILLED.sentence


def test_where_nobody_broke_the_network_did_and_then_the_first_echo_is_told():
    network = word(1, FailureKind.NETWORK, "the network failed")
    assert (
        nodes.choose_common_verdict(
            ECHO, {0: ECHO, 1: network, 2: word(2, FailureKind.ECHO, "")}, NAMES, waited=None
        )
        is network
    )
    echoes = {rank: word(rank, FailureKind.ECHO, "") for rank in NAMES}
    assert nodes.choose_common_verdict(echoes[2], echoes, NAMES, waited=None) is echoes[0]


@pytest.mark.parametrize("kind", [FailureKind.ECHO, FailureKind.HANG])
def test_a_node_without_a_word_is_waited_for_and_then_lost(kind, messages):
    own = word(0, kind, "no progress")
    said = {0: own, 2: word(2, kind, "no progress")}
    assert nodes.choose_common_verdict(own, said, NAMES, waited=None) is None
    lost = nodes.choose_common_verdict(own, said, NAMES, waited=20)
    assert lost is not None
    messages(lost.sentence)
    assert (lost.kind, lost.code) == (FailureKind.LOST_NODE, ExitCode.JOB_FAILED)
    assert (lost.action, lost.node) == (RestartAction.RESTART_WITHOUT, "gpu08")


def test_a_hang_of_all_nodes_is_a_hang():
    hangs = {rank: word(rank, FailureKind.HANG, "no progress", code=ExitCode.HANG) for rank in NAMES}
    assert nodes.choose_common_verdict(hangs[1], hangs, NAMES, waited=None) is hangs[0]
    assert nodes.choose_common_verdict(ECHO, hangs | {0: ECHO}, NAMES, waited=None) is hangs[1]


def test_a_node_that_saved_explains_the_echo_of_its_end_and_one_that_ended_well_nothing():
    well = Verdict(ExitCode.OK, node_rank=1)
    saved = word(2, FailureKind.PREEMPTED, "saved", code=ExitCode.PREEMPTED)
    assert nodes.choose_common_verdict(ECHO, {0: ECHO, 1: well, 2: saved}, NAMES, waited=None) is saved
    assert (
        nodes.choose_common_verdict(ECHO, {0: ECHO, 1: well}, {0: "gpu07", 1: "gpu08"}, waited=None) is ECHO
    )


def test_each_node_leaves_its_word_and_one_that_knows_what_broke_waits_only_to_start_again(tmp_path, clock):
    here(tmp_path, {0: "gpu07", 2: "gpu09"})
    full = word(2, FailureKind.DISK, "its disk is full", RestartAction.STOP)
    assert nodes.agree_on_verdict(full, tmp_path) is full and clock == [100.0]
    assert nodes.agree_on_verdict(ECHO, tmp_path) == full
    assert nodes.agree_on_verdict(ECHO, None) is ECHO


def test_a_node_that_may_start_again_leaves_when_all_have_ended_or_says_who_has_not(tmp_path, clock):
    here(tmp_path, {0: "gpu07", 2: "gpu09"})
    assert nodes.agree_on_verdict(KILLED, tmp_path) == replace(KILLED, silent=("gpu07",))
    assert nodes.VERDICT_SECONDS <= clock[0] - 100 <= nodes.VERDICT_SECONDS + 1
    later = clock[0] + 7

    def ends() -> None:
        if clock[0] >= later:
            nodes.agree_on_verdict(ECHO, tmp_path, seconds=-1)

    assert nodes.agree_on_verdict(KILLED, tmp_path, send_heartbeat=ends) == KILLED
    assert later <= clock[0] <= later + 1
    assert nodes.agree_on_verdict(ECHO, tmp_path) == KILLED


@pytest.mark.parametrize(
    ("said", "ends"),
    [
        (KILLED, True),
        (word(2, FailureKind.ECHO, "lost its connection"), True),
        (word(2, FailureKind.HANG, "no progress", code=ExitCode.HANG), False),
        (word(2, FailureKind.PREEMPTED, "saved", code=ExitCode.PREEMPTED), False),
        (Verdict(ExitCode.OK, node_rank=2), False),
        (replace(KILLED, node_rank=0), False),  # our own
    ],
)
def test_a_node_sees_that_the_ranks_of_another_have_ended_with_a_failure(tmp_path, clock, said, ends):
    where = Rendezvous(3, 0, "h", 1, "test", "said")
    others = nodes.PeerFailurePoll(tmp_path, where)
    clock[0] += 10
    assert not others.has_failed_peer_after_poll()  # whose ranks have not met
    here(tmp_path / "world-1", NAMES)
    (tmp_path / outcomes.WORLD_FOLDER_PATH_FILE).write_text(str(tmp_path / "world-1"))
    clock[0] += 10
    assert not others.has_failed_peer_after_poll()
    nodes.agree_on_verdict(replace(said, nodes=3), tmp_path / "world-1", seconds=-1)
    clock[0] += 0.5
    assert not others.has_failed_peer_after_poll()  # a shared disk is not asked all the time
    clock[0] += 10
    assert others.has_failed_peer_after_poll() is others.has_failed_peer is ends


def here(world: Path, names: Mapping[int, str]) -> None:
    """Nodes whose ranks have met."""
    (world / outcomes.NODES_FOLDER).mkdir(parents=True)
    for rank, name in names.items():
        (world / outcomes.NODES_FOLDER / f"{rank}.json").write_text(json.dumps({"node": name}))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that goes on where somebody sleeps."""
    now = [100.0]
    monkeypatch.setattr("bundle.launch.nodes.time.monotonic", lambda: now[0])
    monkeypatch.setattr("bundle.launch.nodes.time.sleep", lambda seconds: now.append(now.pop() + seconds))
    return now


@pytest.mark.parametrize(("count", "interval", "limit"), [(8, 2, 20), (40, 2, 20), (1024, 51.2, 69.2)])
def test_running_nodes_look_at_each_other_the_more_seldom_the_more_they_are(
    tmp_path, clock, count, interval, limit
):
    assert nodes.get_verdict_seconds(count) == pytest.approx(limit)  # the last to notice is heard too
    here(tmp_path / "world-1", {rank: f"gpu{rank}" for rank in range(2)})
    (tmp_path / outcomes.WORLD_FOLDER_PATH_FILE).write_text(str(tmp_path / "world-1"))
    peers = nodes.PeerFailurePoll(tmp_path, Rendezvous(count, 0, "gpu0", 29500, "flags", "given"))
    with asked(tmp_path / "world-1") as events:
        for _ in range(int(4 * 10 * interval)):
            clock[0] += 0.25
            peers.has_failed_peer_after_poll()
    assert events.count("os.listdir") == pytest.approx(10, abs=1) and len(events) < 12


@pytest.mark.parametrize("count", [8, 1024])
def test_a_node_of_many_reads_few_words_and_lists_them_seldom(tmp_path, clock, count):
    echoes = [replace(ECHO, node=f"gpu{rank}", node_rank=rank, nodes=count) for rank in range(count)]
    here(tmp_path, {rank: f"gpu{rank}" for rank in range(count)})
    for rank in set(range(count)) - {1, 7}:
        left = tmp_path / outcomes.NODES_FOLDER / f"{rank}.1.echo.restart.verdict.json"
        left.write_text(json.dumps(echoes[rank].dump()))
    beats: list[float] = []
    clock[0] = 200.0
    with asked(tmp_path) as events:
        lost = nodes.agree_on_verdict(echoes[1], tmp_path, send_heartbeat=lambda: beats.append(clock[0]))
    assert (lost.kind, lost.node, lost.node_rank) == (FailureKind.LOST_NODE, "gpu7", 7)
    seconds = nodes.get_verdict_seconds(count)
    assert seconds <= clock[0] - 200 <= seconds + 1
    # Our own word, and the folder that it is in, and the name of the lost node.
    assert events.count("open") == 3
    assert count * events.count("os.listdir") / seconds <= 310
    assert all(after - before <= 0.5 for before, after in pairwise(beats))
    nodes.agree_on_verdict(replace(KILLED, node_rank=7), tmp_path)
    ended = clock[0]
    with asked(tmp_path) as events:
        assert nodes.agree_on_verdict(echoes[1], tmp_path) == replace(KILLED, node_rank=7)
    assert events.count("open") == 3 and clock[0] == ended


def test_of_words_that_say_as_little_the_first_nodes_is_told(tmp_path, clock):
    here(tmp_path, {2: "gpu2", 10: "gpu10"})
    second, tenth = (replace(ECHO, node=f"gpu{rank}", node_rank=rank) for rank in (2, 10))
    assert nodes.agree_on_verdict(second, tmp_path, seconds=-1).node == "gpu10"  # which has said nothing
    assert nodes.agree_on_verdict(tenth, tmp_path) == second


def test_what_is_said_while_a_slow_disk_is_looked_at_is_read_before_anybody_is_lost(
    tmp_path, clock, monkeypatch
):
    here(tmp_path, NAMES)
    nodes.agree_on_verdict(replace(ECHO, node_rank=1), tmp_path, seconds=-1)
    listed = Path.iterdir

    def slow(folder: Path) -> list[Path]:
        found = list(listed(folder))
        if len(found) < 6:
            clock[0] += nodes.VERDICT_SECONDS + 1
            nodes.agree_on_verdict(KILLED, tmp_path)
        return found

    monkeypatch.setattr(Path, "iterdir", slow)
    assert nodes.agree_on_verdict(ECHO, tmp_path) == KILLED


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        *((kind, RestartAction.RESTART) for kind in FailureKind),
        *((FailureKind.DEVICE, action) for action in RestartAction),
    ],
)
def test_every_kind_of_word_is_found_by_its_name(tmp_path, clock, kind, action):
    here(tmp_path, {0: "gpu07", 2: "gpu09"})
    said = word(2, kind, "so it is", action, code=ExitCode.HANG)
    nodes.agree_on_verdict(said, tmp_path, seconds=-1)
    _, seen = nodes._read_nodes_and_verdicts(tmp_path / outcomes.NODES_FOLDER)
    found = {rank: (each.kind, each.action, each.code) for rank, each in seen.items()}
    assert found == {2: (kind, action, ExitCode.HANG)}


WORKER = "tests.launch.worker"


def two_nodes(folder: Path, monkeypatch: pytest.MonkeyPatch, port: int, does: str) -> list[subprocess.Popen]:
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_MASTER_ADDR", "localhost")
    monkeypatch.setenv("PET_MASTER_PORT", str(port))
    monkeypatch.setenv("TEST_WORLD", str(folder / "world"))
    started = []
    for node in (0, 1):
        (folder / str(node)).mkdir()
        monkeypatch.setenv("PET_NODE_RANK", str(node))
        monkeypatch.setenv("SLURMD_NODENAME", f"node{node}")
        started.append(start(folder / str(node), WORKER, does))
    return started


@pytest.mark.world
def test_a_node_whose_ranks_notice_nothing_ends_with_the_one_that_broke(tmp_path, monkeypatch):
    with reserved() as port:
        both = two_nodes(tmp_path, monkeypatch, port, "deaf")
        while len(list((tmp_path / "world").glob("ready-*"))) < 4:
            assert all(each.poll() is None for each in both)
            time.sleep(0.02)
        ranks = [[each.pid for each in outcomes.read(tmp_path / node / "logs")] for node in ("0", "1")]
        os.kill(ranks[0][0], signal.SIGSTOP)
        os.kill(ranks[1][0], signal.SIGKILL)
        said = [finish(each, 1, 60)[1].splitlines()[-1] for each in both]
    assert gone([pid for each in ranks for pid in each])
    verdicts = [read_verdict(tmp_path / node) for node in ("0", "1")]
    assert said == [verdict["sentence"] for verdict in verdicts]
    for verdict in verdicts:
        assert (verdict["kind"], verdict["rank"], verdict["node"]) == ("killed", 2, "node1")
        assert verdict["silent"] == []


@pytest.mark.world
@pytest.mark.parametrize(
    ("lost", "is_ended"), [(False, False), pytest.param(True, False, marks=pytest.mark.slow), (True, True)]
)
def test_both_nodes_say_who_was_killed_and_the_one_that_is_left_which_node_was(
    tmp_path, monkeypatch, lost, is_ended
):
    with reserved() as port:
        first, second = two_nodes(tmp_path, monkeypatch, port, "mourn")
        while len(list((tmp_path / "world").glob("ready-*"))) < 4:
            assert first.poll() is None and second.poll() is None
        pids = [each.pid for each in outcomes.read(tmp_path / "1" / "logs")]
        if lost:
            second.kill()
        else:
            os.kill(pids[0], signal.SIGKILL)
        if is_ended:  # as Slurm ends a job for its lost node, while the node that is left waits for it
            while not list(tmp_path.rglob("nodes/0.*.verdict.json")):
                assert first.poll() is None
                time.sleep(0.02)
            first.terminate()
            began = time.monotonic()
        ended = [(finish(first, 1, 90)[1], read_verdict(tmp_path / "0"))]
        assert not is_ended or time.monotonic() - began < nodes.VERDICT_SECONDS / 2
        ended += [] if lost else [(finish(second, 1)[1], read_verdict(tmp_path / "1"))]
    expected = ("lost node", "restart without node") if lost else ("killed", "restart")
    for said, verdict in ended:
        assert said.splitlines()[-1] == verdict["sentence"]
        assert (verdict["kind"], verdict["action"], verdict["node"]) == (*expected, "node1")
        assert lost or verdict["rank"] == 2
    assert gone(pids)
