"""What a hang is, of where each rank says that it stands; sentences word by word."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bundle.launch import hang
from bundle.launch.hang import Collective, RankSnapshot, summarize_hang

ALL, TENSOR = (0, 1, 2, 3), (0, 1)


def stands(
    rank: int, waits: Collective | None = None, frame: str = "`f` (a.py:1)", **entered: int
) -> RankSnapshot:
    return RankSnapshot(rank, f"node{rank // 2}", "step 4", 30.0, frame, waits, entered)


def reduce(
    number: int, group: str = "all", ranks: tuple[int, ...] = ALL, what: str = "all_reduce of 2x3"
) -> Collective:
    return Collective(group, ranks, number, what)


def test_who_never_came_is_told_with_what_it_does_instead():
    found = summarize_hang(
        [
            stands(0, reduce(7), all=7),
            stands(1, reduce(7), all=7),
            stands(2, reduce(7), all=7),
            stands(3, frame="`read` (rows.py:40)", all=6),
        ]
    )
    assert found.rank == 3
    assert found.text == (
        "ranks 0-2 in all_reduce of 2x3 number 7 of all, at `f` (a.py:1), in step 4;"
        " rank 3 on node1 never came: it is at `read` (rows.py:40), in step 4"
    )


def test_a_rank_that_waits_for_others_itself_is_not_the_one_that_holds_up_all():
    tensor = reduce(3, "tensor", (0, 1), "broadcast of 8")
    standings = [stands(0, tensor, all=6, tensor=3), stands(1, all=6, tensor=2), stands(2, reduce(7), all=7)]
    standings += [stands(3, reduce(7), all=7)]
    for order in (standings, standings[::-1]):
        found = summarize_hang(order)
        assert found.rank == 1
        assert found.text == (
            "rank 0 in broadcast of 8 number 3 of tensor, at `f` (a.py:1), in step 4;"
            " rank 1 on node0 never came: it is at `f` (a.py:1), in step 4"
        )


def test_ranks_that_wait_for_each_other_are_told_of_both():
    metrics = reduce(2, "cp", TENSOR, "all_reduce of 1")
    found = summarize_hang([stands(0, metrics, all=6, cp=2), stands(1, reduce(7, ranks=TENSOR), all=7, cp=1)])
    assert found.rank is None
    assert found.text == (
        "ranks wait for each other: rank 0 on node0: in all_reduce of 1 number 2 of cp, at `f` (a.py:1), in"
        " step 4; rank 1 on node0: in all_reduce of 2x3 number 7 of all, at `f` (a.py:1), in step 4"
    )


def test_ranks_that_came_to_other_calls_of_one_group_are_told_of_both():
    here, there = reduce(7, ranks=TENSOR), reduce(7, ranks=TENSOR, what="broadcast of 8")
    assert summarize_hang([stands(0, here, all=7), stands(1, there, all=7)]).text == (
        "rank 0 in all_reduce of 2x3 number 7 of all, at `f` (a.py:1), in step 4;"
        " rank 1 on node0: in broadcast of 8 number 7 of all, at `f` (a.py:1), in step 4"
    )
    assert summarize_hang([stands(0, here, all=7), stands(1, here, all=7)]).text == (
        "ranks 0-1 in all_reduce of 2x3 number 7 of all, at `f` (a.py:1), in step 4, to which all came"
    )


def test_a_rank_of_which_nothing_is_known_is_told_too_and_many_are_counted():
    at = reduce(7, ranks=tuple(range(10)))
    found = summarize_hang([stands(0, at, all=7), RankSnapshot(1, "node0", silent="its process has ended")])
    assert found.text == "; ".join(
        [
            "rank 0 in all_reduce of 2x3 number 7 of all, at `f` (a.py:1), in step 4",
            "rank 1 on node0 never came: its process has ended",
            *(f"rank {rank} never came: it says nothing" for rank in (2, 3, 4)),
            "and 5 more",
        ]
    )


def test_without_collectives_all_say_where_they_are():
    assert summarize_hang([stands(0)]) == ("rank 0 on node0: at `f` (a.py:1), in step 4", 0)
    forgotten = Collective("group 9", (), 1, "send of 4")
    assert summarize_hang([stands(0, forgotten), stands(1)]).text == (
        "rank 0 on node0: in send of 4 number 1 of group 9, at `f` (a.py:1), in step 4;"
        " rank 1 on node0: at `f` (a.py:1), in step 4"
    )


def test_a_standing_is_read_as_it_was_written(tmp_path):
    for standing in (stands(3, reduce(7), all=7), stands(12)):
        hang.write(tmp_path, standing)
    assert hang.read(tmp_path) == [stands(3, reduce(7), all=7), stands(12)]
    assert hang.has_snapshot(tmp_path, 12) and not hang.has_snapshot(tmp_path, 1)


@pytest.mark.parametrize(
    ("number", "says"), [(signal.SIGSTOP, "its process is stopped (SIGSTOP)"), (None, "")]
)
def test_the_state_of_a_process_is_the_kernels(number, says):
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None and process.stdout.read(1)  # Python itself is loaded
        if number is not None:
            process.send_signal(number)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert hang.describe_process_state(process.pid) == says
    finally:
        process.kill()
        process.communicate()
    assert hang.describe_process_state(process.pid) == "its process has ended"


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
        "def count_without_end():\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "count_without_end()\n"
    )
    (tmp_path / "counting.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "counting.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    where = Path(tmp_path, "counting.py")
    assert hang.find_innermost_frame(f"before\n{done.stderr}") in (
        f"`count_without_end` ({where}:4)",
        "`count_without_end` (counting.py:4)",
    )
    assert hang.find_innermost_frame("nothing of the kind") == ""
