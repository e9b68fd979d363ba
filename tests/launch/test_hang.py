"""What a hang is, of where each rank says that it stands."""

import os
import signal
import subprocess
import sys

import pytest

from bundle.launch import hang
from bundle.launch.hang import Collective, RankSnapshot, summarize_hang

ALL, TENSOR = (0, 1, 2, 3), (0, 1)


def stands(
    rank: int, waits: Collective | None = None, frame: str = "`f` (a.py:1)", **entered: int
) -> RankSnapshot:
    return RankSnapshot(rank, f"node{rank // 2}", "step 4", 30.0, frame, waits, entered)


def reduce(
    number: int,
    group: str = "all",
    ranks: tuple[int, ...] = ALL,
    what: str = "all_reduce of shape 2x3",
) -> Collective:
    return Collective(group, ranks, number, what)


def test_who_never_came_is_told_with_what_it_does_instead(messages):
    found = summarize_hang(
        [
            stands(0, reduce(7), all=7),
            stands(1, reduce(7), all=7),
            stands(2, reduce(7), all=7),
            stands(3, frame="`read` (rows.py:40)", all=6),
        ]
    )
    messages(found.text)
    assert found.rank == 3
    present, absent = found.text.split("; ")
    assert "0-2" in present and "all_reduce" in present
    assert "node1" in absent and "rows.py:40" in absent


def test_a_rank_that_waits_for_others_itself_is_not_the_one_that_holds_up_all(messages):
    tensor = reduce(3, "tensor", (0, 1), "broadcast of shape 8")
    standings = [stands(0, tensor, all=6, tensor=3), stands(1, all=6, tensor=2), stands(2, reduce(7), all=7)]
    standings += [stands(3, reduce(7), all=7)]
    found = summarize_hang(standings)
    messages(found.text)
    assert found == summarize_hang(standings[::-1])
    assert found.rank == 1 and "broadcast" in found.text and "all_reduce" not in found.text


def test_ranks_that_wait_for_each_other_are_told_of_both(messages):
    metrics = reduce(2, "cp", TENSOR, "all_reduce of shape 1")
    found = summarize_hang([stands(0, metrics, all=6, cp=2), stands(1, reduce(7, ranks=TENSOR), all=7, cp=1)])
    messages(found.text)
    first, second = found.text.split("; ")
    assert found.rank is None and str(metrics) in first and "rank 1" in second


def test_ranks_that_came_to_other_calls_of_one_group_are_told_of_both(messages):
    here, there = reduce(7, ranks=TENSOR), reduce(7, ranks=TENSOR, what="broadcast of shape 8")
    apart = summarize_hang([stands(0, here, all=7), stands(1, there, all=7)]).text
    messages(apart)
    first, second = apart.split("; ")
    assert str(here) in first and str(there) in second
    together = summarize_hang([stands(0, here, all=7), stands(1, here, all=7)]).text
    messages(together)
    assert "0-1" in together and ";" not in together


def test_a_rank_of_which_nothing_is_known_is_told_too_and_many_are_counted(messages):
    at = reduce(7, ranks=tuple(range(10)))
    found = summarize_hang([stands(0, at, all=7), RankSnapshot(1, "node0", silent="its process has ended")])
    messages(found.text)
    present, ended, *silent, rest = found.text.split("; ")
    assert "rank 0" in present and hang.PROCESS_ENDED in ended
    assert [part.split()[1] for part in silent] == ["2", "3", "4"] and "5 more" in rest


def test_without_collectives_all_say_where_they_are(messages):
    alone = summarize_hang([stands(0)])
    messages(alone.text)
    assert alone.rank == 0 and "a.py:1" in alone.text
    forgotten = Collective("group 9", (), 1, "send of 4")
    both = summarize_hang([stands(0, forgotten), stands(1)])
    messages(both.text)
    first, second = both.text.split("; ")
    assert both.rank is None and str(forgotten) in first and "a.py:1" in second


def test_a_standing_is_read_as_it_was_written(tmp_path):
    for standing in (stands(3, reduce(7), all=7), stands(12)):
        hang.write(tmp_path, standing)
    assert hang.read(tmp_path) == [stands(3, reduce(7), all=7), stands(12)]
    assert hang.has_snapshot(tmp_path, 12) and not hang.has_snapshot(tmp_path, 1)


@pytest.mark.parametrize("number", [signal.SIGSTOP, None])
def test_the_state_of_a_process_is_the_kernels(number, messages):
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None and process.stdout.read(1)  # Python itself is loaded
        if number is not None:
            process.send_signal(number)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        state = hang.describe_unresponsive_state(process.pid)
        messages(state)
        assert "SIGSTOP" in state if number else state == ""
    finally:
        process.kill()
        process.communicate()
    assert hang.describe_unresponsive_state(process.pid) == hang.PROCESS_ENDED


@pytest.mark.parametrize(
    ("does", "hears"), [("faulthandler.register(signal.SIGUSR1)", True), ("signal.SIGUSR1", False)]
)
def test_a_process_that_would_die_of_the_question_is_not_asked(does, hears):
    process = subprocess.Popen(
        [sys.executable, "-c", f"import faulthandler, signal; {does}; print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None and process.stdout.read(1)
        assert hang.can_print_stacks(process.pid) is hears
    finally:
        process.kill()
        process.communicate()
    assert not hang.can_print_stacks(process.pid)


def test_the_frame_that_faulthandler_prints_last_is_read(tmp_path):
    script = (
        "import faulthandler, os, signal, sys\n"
        "faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True, chain=False)\n"
        "def count():\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "count()\n"
    )
    (tmp_path / "counting.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "counting.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert hang.find_innermost_frame(f"before\n{done.stderr}") in (
        f"`count` ({tmp_path / 'counting.py'}:4)",
        "`count` (counting.py:4)",
    )
    assert hang.find_innermost_frame("no stacks") == ""
