"""Who takes part in a round, and what nodes know of each other by their files."""

import json
import threading
from pathlib import Path

import pytest

from bundle.errors import ExitCode
from bundle.launch import roster as rosters
from bundle.launch.causes import Action, Kind
from bundle.launch.roster import Entry, Roster, Round, resolved, upcoming
from bundle.launch.verdict import Verdict


def entry(number: int, waits_for: int | None = 2, out: str = "") -> Entry:
    return Entry(f"t{number}", number, f"gpu{number}", f"10.0.0.{number}", 1, waits_for, out)


FIRST = Round(1, ("t0", "t1"), "10.0.0.0", False)


def members(last: Round | None, here: list[Entry], gone: set[str], nodes: int = 2) -> tuple[str, ...] | None:
    made = upcoming(last, here, gone, nodes, continues=True)
    return made.members if made else None


def test_the_first_round_is_of_those_that_come_and_they_meet_at_the_first():
    here = [entry(2, 1), entry(0, 1)]
    assert upcoming(None, here, set(), 2, continues=False) == Round(1, ("t0", "t2"), "10.0.0.0", False)
    assert members(None, here[:1], set()) is None


def test_a_spare_takes_the_place_of_one_that_is_lost_and_the_job_moves_to_who_is_left():
    assert members(FIRST, [entry(0), entry(2)], {"t1"}) == ("t0", "t2")
    moved = upcoming(FIRST, [entry(1), entry(2)], {"t0"}, 2, continues=True)
    assert moved == Round(2, ("t1", "t2"), "10.0.0.1", True)


def test_the_same_nodes_go_on_where_they_can_and_a_spare_stays_one():
    assert members(FIRST, [entry(2), entry(1), entry(0)], set()) == ("t0", "t1")


@pytest.mark.parametrize(
    "here",
    [
        [entry(0), entry(1, None), entry(2)],  # which still runs, or has not said yet that it does not
        [entry(0), entry(2)],  # of the other nobody knows yet
        [entry(0), entry(1, None, "bad")],  # nobody is left
        [entry(0), entry(1, 1), entry(2)],  # which was told of the round before, and has not begun it
    ],
)
def test_no_round_begins_while_a_member_may_run_or_too_few_wait(here):
    assert members(FIRST, here, set()) is None


def test_a_bad_node_stays_out_and_is_not_waited_for():
    assert members(FIRST, [entry(0), entry(1, 2, "its GPU failed"), entry(2)], set()) == ("t0", "t2")
    assert resolved(FIRST, [entry(0), entry(1, 2, "its GPU failed")], set())
    assert not resolved(FIRST, [entry(0)], set())


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that a test sets."""
    now = [100.0]
    monkeypatch.setattr("bundle.launch.roster.time.monotonic", lambda: now[0])
    return now


def watch(one: Roster, time: list[float], seconds: float) -> None:
    time[0] += seconds
    assert one.look()


def test_a_node_lives_while_its_entry_changes_and_is_lost_when_it_no_longer_does(tmp_path, time):
    one, other = (Roster(tmp_path, n, f"gpu{n}", "h") for n in (0, 1))
    one.say(waits_for=1)
    watch(one, time, 1)
    other.say(waits_for=1)
    watch(one, time, 1)
    assert {each.name for each in one.alive()} == {"gpu0", "gpu1"}
    assert one.saw([other.own.token]) and one.lost([other.own.token]) == set()
    for _ in range(7):
        watch(one, time, 4)
    assert one.lost([other.own.token]) == set()
    assert [each.name for each in one.alive(within=9)] == ["gpu0"]
    watch(one, time, rosters.LOST_SECONDS - 27)
    assert one.lost([other.own.token]) == {other.own.token}
    assert [each.name for each in one.alive()] == ["gpu0"]
    other.beat()
    watch(one, time, 1)
    assert one.lost([other.own.token]) == set()


def test_a_node_that_could_not_look_itself_takes_nobody_for_lost(tmp_path, time):
    one, other = (Roster(tmp_path, n, f"gpu{n}", "h") for n in (0, 1))
    watch(one, time, 1)
    other.say(waits_for=1)
    watch(one, time, 1)
    watch(one, time, 1000)  # its ranks ran, or the disk answered nobody
    assert one.lost([other.own.token]) == set()
    for _ in range(9):
        watch(one, time, 4)
    assert one.lost([other.own.token]) == {other.own.token}


def test_what_an_earlier_start_left_neither_lives_nor_ends_this_one_and_is_removed(tmp_path, time):
    earlier = Roster(tmp_path, 1, "gpu1", "h")
    earlier.say(waits_for=1)
    earlier.propose(Round(1, (earlier.own.token,), "h", False))
    earlier.say(ended=Verdict(ExitCode.PREEMPTED, Kind.PREEMPTED, "saved", Action.RESTART).dump())
    one = Roster(tmp_path, 0, "gpu0", "h")
    one.say(waits_for=2)
    watch(one, time, 1)
    last = one.round()
    assert last is not None and last.members == (earlier.own.token,)
    assert not one.saw(last.members) and one.ends(last.members) == []
    assert one.ended(last.members) == set(last.members)
    made = upcoming(last, one.alive(), one.ended(last.members), 1, continues=one.saw(last.members))
    assert made == Round(2, (one.own.token,), "h", False)
    one.propose(made)
    assert [path.name for path in tmp_path.glob("node-*")] == [f"node-{one.own.token}.json"]


def test_how_a_node_ended_is_known_to_who_saw_it_run(tmp_path, time):
    one, other = (Roster(tmp_path, n, f"gpu{n}", "h") for n in (0, 1))
    other.say(waits_for=1)
    watch(one, time, 1)
    verdict = Verdict(ExitCode.JOB_FAILED, Kind.DISK, "its disk is full", Action.STOP, evidence=("a",))
    other.say(ended=verdict.dump())
    watch(one, time, 1)
    assert one.ends([other.own.token]) == [verdict]
    assert one.lost([other.own.token]) == set()


def test_of_two_that_make_the_same_round_one_does_and_it_is_whole(tmp_path):
    nodes = [Roster(tmp_path, n, f"gpu{n}", "h") for n in range(8)]
    both = threading.Barrier(len(nodes), timeout=30)

    seen: set[Round | None] = set()

    def propose(one: Roster) -> None:
        both.wait()
        one.propose(Round(1, (one.own.token,), "h", True))
        seen.add(one.round())  # which is the one that it takes part in, or does not

    threads = [threading.Thread(target=propose, args=(one,)) for one in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made = nodes[0].round()
    assert made is not None and made.members[0] in {one.own.token for one in nodes}
    assert seen == {made}
    assert [path.name for path in tmp_path.iterdir()] == ["round-1.json"]


def test_many_nodes_look_less_often(tmp_path, time):
    one = Roster(tmp_path, 0, "gpu0", "h")
    for number in range(100):
        values = {"token": f"t{number}", "number": number, "name": "n", "address": "h"}
        (tmp_path / f"node-t{number}.json").write_text(json.dumps(values))
    watch(one, time, 1)
    time[0] += 10
    assert not one.look()  # 100 nodes, each of which reads 100 files
    watch(one, time, 11)


def test_a_disk_that_takes_no_more_ends_no_node(tmp_path, time):
    one = Roster(tmp_path / "roster", 0, "gpu0", "h")
    Path(tmp_path / "roster").rmdir()
    time[0] += 100
    one.beat()
    assert not list(tmp_path.iterdir())
