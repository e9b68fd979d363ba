"""Who takes part in a round, and what nodes know of each other by their files."""

import threading
from pathlib import Path

import pytest

from bundle.errors import ExitCode
from bundle.launch import node_registry as rosters
from bundle.launch.causes import FailureKind, RestartAction
from bundle.launch.node_registry import (
    Heartbeat,
    NodeRegistry,
    Round,
    has_no_running_members,
    plan_next_round,
)
from bundle.launch.verdict import Verdict
from tests.launch.launched import asked


def sign(number: int, waits_for: int | None = 2, *, out: bool = False) -> Heartbeat:
    return Heartbeat(f"t{number}", number, 1, waits_for, out)


FIRST = Round(1, ("t0", "t1"), False)


def members(
    last: Round | None, here: list[Heartbeat], gone: set[str], nodes: int = 2
) -> tuple[str, ...] | None:
    made = plan_next_round(last, here, gone, nodes, continues=True)
    return made.members if made else None


def test_the_first_round_is_of_those_that_come_and_they_meet_at_the_first():
    here = [sign(2, 1), sign(0, 1)]
    assert plan_next_round(None, here, set(), 2, continues=False) == Round(1, ("t0", "t2"), False)
    assert members(None, here[:1], set()) is None


def test_a_spare_takes_the_place_of_one_that_is_lost_and_the_job_moves_to_who_is_left():
    assert members(FIRST, [sign(0), sign(2)], {"t1"}) == ("t0", "t2")
    moved = plan_next_round(FIRST, [sign(1), sign(2)], {"t0"}, 2, continues=True)
    assert moved == Round(2, ("t1", "t2"), True)


def test_the_same_nodes_go_on_where_they_can_and_a_spare_stays_one():
    assert members(FIRST, [sign(2), sign(1), sign(0)], set()) == ("t0", "t1")


@pytest.mark.parametrize(
    "here",
    [
        [sign(0), sign(1, None), sign(2)],  # which still runs, or has not said yet that it does not
        [sign(0), sign(2)],  # of the other nobody knows yet
        [sign(0), sign(1, None, out=True)],  # nobody is left
        [sign(0), sign(1, 1), sign(2)],  # which was told of the round before, and has not begun it
    ],
)
def test_no_round_begins_while_a_member_may_run_or_too_few_wait(here):
    assert members(FIRST, here, set()) is None


def test_a_bad_node_stays_out_and_is_not_waited_for():
    assert members(FIRST, [sign(0), sign(1, 2, out=True), sign(2)], set()) == ("t0", "t2")
    assert has_no_running_members(FIRST, [sign(0), sign(1, 2, out=True)], set())
    assert not has_no_running_members(FIRST, [sign(0)], set())


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that a test sets."""
    now = [100.0]
    monkeypatch.setattr("bundle.launch.node_registry.time.monotonic", lambda: now[0])
    return now


def watch(one: NodeRegistry, time: list[float], seconds: float) -> None:
    time[0] += seconds
    assert one.poll_if_due()


def test_a_node_lives_while_its_entry_changes_and_is_lost_when_it_no_longer_does(tmp_path, time):
    one, other = (NodeRegistry(tmp_path, n, f"gpu{n}", "h") for n in (0, 1))
    one.update_entry(waits_for=1)
    watch(one, time, 1)
    other.update_entry(waits_for=1)
    watch(one, time, 1)
    assert {each.number for each in one.find_live_nodes()} == {0, 1}
    assert (
        one.has_any_heartbeat_since_start([other.own_entry.token])
        and one.find_lost_nodes([other.own_entry.token]) == set()
    )
    for _ in range(7):
        watch(one, time, 4)
    assert one.find_lost_nodes([other.own_entry.token]) == set()
    assert [each.number for each in one.find_live_nodes(within=9)] == [0]
    watch(one, time, rosters.LOST_SECONDS - 27)
    assert one.find_lost_nodes([other.own_entry.token]) == {other.own_entry.token}
    assert [each.number for each in one.find_live_nodes()] == [0]
    other.send_heartbeat_if_due()
    watch(one, time, 1)
    assert one.find_lost_nodes([other.own_entry.token]) == set()


def test_a_node_that_could_not_look_itself_takes_nobody_for_lost(tmp_path, time):
    one, other = (NodeRegistry(tmp_path, n, f"gpu{n}", "h") for n in (0, 1))
    watch(one, time, 1)
    other.update_entry(waits_for=1)
    watch(one, time, 1)
    watch(one, time, 1000)  # its ranks ran, or the disk answered nobody
    assert one.find_lost_nodes([other.own_entry.token]) == set()
    for _ in range(9):
        watch(one, time, 4)
    assert one.find_lost_nodes([other.own_entry.token]) == {other.own_entry.token}


def test_what_an_earlier_start_left_neither_lives_nor_ends_this_one_and_is_removed(tmp_path, time):
    earlier = NodeRegistry(tmp_path, 1, "gpu1", "h")
    earlier.update_entry(waits_for=1)
    earlier.create_round_if_absent(Round(1, (earlier.own_entry.token,), False))
    earlier.update_entry(
        ended=Verdict(ExitCode.PREEMPTED, FailureKind.PREEMPTED, "saved", RestartAction.RESTART).dump()
    )
    one = NodeRegistry(tmp_path, 0, "gpu0", "h")
    one.update_entry(waits_for=2)
    watch(one, time, 1)
    last = one.read_newest_round()
    assert last is not None and last.members == (earlier.own_entry.token,)
    assert (
        not one.has_any_heartbeat_since_start(last.members)
        and one.find_newly_recorded_exit_codes(last.members) == {}
    )
    assert one.find_ended_nodes(last.members) == set(last.members)
    made = plan_next_round(
        last,
        one.find_live_nodes(),
        one.find_ended_nodes(last.members),
        1,
        continues=one.has_any_heartbeat_since_start(last.members),
    )
    assert made == Round(2, (one.own_entry.token,), False)
    one.create_round_if_absent(made)
    assert [path.name for path in tmp_path.glob("node-*")] == [f"node-{one.own_entry.token}.json"]
    assert [path.name.split("-")[1] for path in tmp_path.glob("beat-*")] == [one.own_entry.token]


def test_how_a_node_ended_is_known_to_who_saw_it_run(tmp_path, time):
    one, other = (NodeRegistry(tmp_path, n, f"gpu{n}", "h") for n in (0, 1))
    other.update_entry(waits_for=1)
    watch(one, time, 1)
    verdict = Verdict(
        ExitCode.JOB_FAILED, FailureKind.DISK, "its disk is full", RestartAction.STOP, evidence=("a",)
    )
    other.update_entry(ended=verdict.dump())
    watch(one, time, 1)
    assert one.find_newly_recorded_exit_codes([other.own_entry.token]) == {other.own_entry.token: 1}
    assert one.read_peer_verdict(other.own_entry.token) == verdict
    for _ in range(10):
        watch(one, time, 4)
    assert one.find_lost_nodes([other.own_entry.token]) == set()


def test_of_two_that_make_the_same_round_one_does_and_it_is_whole(tmp_path):
    nodes = [NodeRegistry(tmp_path, n, f"gpu{n}", "h") for n in range(8)]
    both = threading.Barrier(len(nodes), timeout=30)

    seen: set[Round | None] = set()

    def propose(one: NodeRegistry) -> None:
        both.wait()
        one.create_round_if_absent(Round(1, (one.own_entry.token,), True))
        seen.add(one.read_newest_round())  # which is the one that it takes part in, or does not

    threads = [threading.Thread(target=propose, args=(one,)) for one in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made = nodes[0].read_newest_round()
    assert made is not None and made.members[0] in {one.own_entry.token for one in nodes}
    assert seen == {made}
    assert [path.name for path in tmp_path.iterdir()] == ["round-1.json"]


class Crowd:
    """Nodes as the files that they leave: each beats every two seconds but for those that are dead.

    `before`: entries that an earlier start has left.
    """

    def __init__(self, folder: Path, time: list[float], count: int, before: int) -> None:
        self.folder, self.time, self.count = folder, time, count
        self.tokens = [f"t{number}" for number in range(1, count)]
        self.dead: set[str] = set()
        self._files = {token: folder / f"beat-{token}-1-0-1-fit-" for token in self.tokens}
        for path in [*self._files.values(), *(folder / f"beat-e{n}-{n}-7-1-fit-" for n in range(before))]:
            path.touch()
        self._beats = 0

    def lives(self, seconds: float, *watchers: NodeRegistry) -> None:
        """Lets so many seconds pass, in which nodes look as often as they may, and beat themselves."""
        for _ in range(int(seconds / 0.25)):
            self.time[0] += 0.25
            if self.time[0] % 2 == 0:
                self._beats += 1
                for token, path in self._files.items():
                    if token not in self.dead:
                        name = f"beat-{token}-1-{self._beats}-1-fit-"
                        self._files[token] = path.rename(path.with_name(name))
            for watcher in watchers:
                watcher.send_heartbeat_if_due()
                watcher.poll_if_due()


@pytest.mark.parametrize(("count", "before"), [(70, 0), (71, 0), (129, 0), (129, 2400), (1024, 0)])
def test_of_however_many_nodes_one_that_is_lost_is_seen_in_time_and_none_that_lives(
    tmp_path, time, count, before
):
    one = NodeRegistry(tmp_path, 0, "gpu0", "h")
    crowd = Crowd(tmp_path, time, count, before)
    one.update_entry(waits_for=1)
    crowd.lives(60, one)
    assert one.find_lost_nodes(crowd.tokens) == set()
    for _ in range(12):
        assert len(one.find_live_nodes(within=rosters.LOST_SECONDS / 3)) == count
        crowd.lives(1, one)
    lost = crowd.tokens[5]
    crowd.dead = {lost}
    crowd.lives(rosters.LOST_SECONDS - 3, one)
    assert one.find_lost_nodes(crowd.tokens) == set()
    crowd.lives(13, one)  # two looks, of a node that may have beaten just before it died
    assert one.find_lost_nodes(crowd.tokens) == {lost}
    assert len(one.find_live_nodes(within=rosters.LOST_SECONDS / 3)) == count - 1


@pytest.mark.parametrize("count", [2, 100, 1024])
def test_all_nodes_together_ask_a_shared_disk_for_little(tmp_path, time, count):
    one = NodeRegistry(tmp_path, 0, "gpu0", "h")
    crowd = Crowd(tmp_path, time, count, before=0)
    one.update_entry(waits_for=1)
    crowd.lives(10, one)
    with asked(tmp_path) as events:
        crowd.lives(60, one)
    assert events.count("open") == 0
    assert events.count("os.listdir") == len(events) >= 11
    assert len(events) * count / 60 <= 210  # listings a second of all nodes, each of which is as this


@pytest.mark.parametrize(("count", "seconds"), [(2, 30), (40, 30), (1024, 102)])
def test_a_running_node_of_many_has_more_time(tmp_path, time, count, seconds):
    """Each node may take 1/20 s for every node; after twice that it is lost, and not before 30 s."""
    spare = NodeRegistry(tmp_path, 0, "gpu0", "h")
    spare.update_entry(waits_for=2)
    waits, runs = (Heartbeat(f"t{number}", number, 1, waits_for) for number, waits_for in ((1, 2), (2, None)))
    others = [Heartbeat(f"t{number}", number, 1, 2) for number in range(3, count)]
    for heartbeat in (waits, runs, *others)[: max(count - 1, 2)]:
        (tmp_path / heartbeat.encoded_file_name).touch()
    watch(spare, time, 1)
    time[0] += 29
    assert spare.find_lost_nodes(["t1", "t2"]) == set()
    time[0] += 2
    assert spare.find_lost_nodes(["t1", "t2"]) == ({"t1", "t2"} if seconds == 30 else {"t1"})
    time[0] += max(seconds - 32, 0)
    assert spare.find_lost_nodes(["t2"]) == ({"t2"} if seconds == 30 else set())
    time[0] += 2
    assert spare.find_lost_nodes(["t2"]) == {"t2"}


@pytest.mark.parametrize(("count", "seconds"), [(2, 2), (40, 2), (1024, 51.25)])
def test_heartbeats_of_running_nodes_are_rarer_the_more_they_are(tmp_path, time, count, seconds):
    one = NodeRegistry(tmp_path, 0, "gpu0", "h")
    one.update_entry(waits_for=1)
    for number in range(1, count):
        (tmp_path / Heartbeat(f"t{number}", number, 1, 1).encoded_file_name).touch()
    watch(one, time, 1)
    one.update_entry(waits_for=None)
    began, counts = time[0], []
    while time[0] < began + 10 * seconds:
        time[0] += 0.25
        one.send_heartbeat_if_due()
        (heartbeat,) = (each for each in one.find_live_nodes() if each.number == 0)
        counts.append(heartbeat.count)
    assert len(set(counts)) - 1 == pytest.approx(10, abs=1)


def test_a_node_that_others_took_for_lost_shows_and_says_again_that_it_lives(tmp_path, time):
    one = NodeRegistry(tmp_path, 0, "gpu0", "h")
    one.update_entry(waits_for=3)
    for path in tmp_path.iterdir():
        path.unlink()
    time[0] += 3
    one.send_heartbeat_if_due()
    other = NodeRegistry(tmp_path, 1, "gpu1", "h")
    other.poll_if_due()
    assert other.find_lost_nodes([one.own_entry.token]) == set()
    assert other.read_entry(one.own_entry.token) == one.own_entry


def test_a_name_says_what_others_decide_by_and_a_listing_that_is_torn_takes_nothing_back(tmp_path, time):
    one, other = (NodeRegistry(tmp_path, n, f"gpu{n}", "h") for n in (0, 1))
    watch(one, time, 1)
    other.update_entry(waits_for=7, out="its GPU failed", ended=Verdict(ExitCode.HANG).dump())
    (shown,) = (path.name for path in tmp_path.glob("beat-*"))
    assert Heartbeat.from_file_name(shown) == Heartbeat(other.own_entry.token, 1, 1, 7, True, 6)
    assert Heartbeat.from_file_name(f"node-{other.own_entry.token}.json") is None
    other.update_entry(waits_for=None, out="", ended=None)
    (tmp_path / shown).touch()  # as it was before, seen once more
    watch(one, time, 1)
    assert one.find_live_nodes()[0] == Heartbeat(other.own_entry.token, 1, 2)
    (tmp_path / Heartbeat(other.own_entry.token, 1, 2).encoded_file_name).unlink()  # and by itself
    watch(one, time, 1)
    assert one.find_live_nodes()[0] == Heartbeat(other.own_entry.token, 1, 2)


def test_a_disk_that_takes_no_more_ends_no_node(tmp_path, time):
    one = NodeRegistry(tmp_path / "roster", 0, "gpu0", "h")
    Path(tmp_path / "roster").rmdir()
    time[0] += 100
    one.send_heartbeat_if_due()
    assert not list(tmp_path.iterdir())
