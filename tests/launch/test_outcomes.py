import os
import signal
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from bundle.errors import ExitCode
from bundle.launch import outcomes as noted
from bundle.launch.outcomes import Outcome, Verdict, judge

CODES = [None, *(int(code) for code in ExitCode)]


def outcome(
    rank: int, code: int | None, message: str = "", *, time: float = 0, explained: bool = True
) -> Outcome:
    return Outcome(rank, rank, 1000 + rank, time, code, message, explained)


def verdict(folder: Path, *outcomes: Outcome, agent: int = 1, stopped_by: int | None = None) -> Verdict:
    return judge(folder, agent, list(outcomes), stopped_by)


def test_the_rank_that_knows_what_is_wrong_speaks_before_the_one_that_only_broke(tmp_path):
    found = verdict(
        tmp_path,
        outcome(0, 1, "RuntimeError: Connection closed by peer", time=1, explained=False),
        outcome(1, 1, "shard 3 is corrupt", time=2),
    )
    assert found == Verdict(ExitCode.JOB_FAILED, "rank 1: shard 3 is corrupt")


def test_a_cause_is_stronger_than_a_plain_failure(tmp_path):
    found = verdict(
        tmp_path, outcome(0, 1, "echo", time=1), outcome(1, 4, "patch x cannot be applied", time=2)
    )
    assert found == Verdict(ExitCode.PATCHES, "rank 1: patch x cannot be applied")


def test_a_hang_names_the_ranks_that_said_nothing(tmp_path):
    found = verdict(tmp_path, outcome(0, 6, "no progress"), outcome(1, None), outcome(2, None))
    assert found == Verdict(ExitCode.HANG, "rank 0: no progress; no word from rank 1, 2")


def test_preempted_ranks_make_a_preempted_job_but_not_if_one_failed_to_save(tmp_path):
    saved = outcome(0, 75, "saved step 7")
    assert verdict(tmp_path, saved, outcome(1, None), stopped_by=signal.SIGTERM).code == ExitCode.PREEMPTED
    assert verdict(tmp_path, saved, outcome(1, 1, "disk full")).code == ExitCode.JOB_FAILED
    assert verdict(tmp_path, saved, outcome(1, None), stopped_by=signal.SIGINT).code == ExitCode.PREEMPTED
    assert verdict(tmp_path, outcome(0, None), stopped_by=signal.SIGTERM).code == ExitCode.TERMINATED
    assert verdict(tmp_path, outcome(0, None), stopped_by=signal.SIGINT).code == ExitCode.INTERRUPTED


def test_a_signal_is_read_from_what_torchrun_saw_first(tmp_path):
    (tmp_path / "agent.log").write_text("E1 failed (exitcode: -9) local_rank: 1 (pid: 7) of binary: python")
    found = verdict(tmp_path, outcome(0, 1, "gloo: connection closed", explained=False), outcome(1, None))
    assert found.message.startswith("rank 1: killed by SIGKILL: by somebody, or by the kernel when memory")


def test_a_kill_for_want_of_memory_says_what_to_lower_and_how_to_go_on(tmp_path):
    (tmp_path / "agent.log").write_text("E1 failed (exitcode: -9) local_rank: 1 (pid: 7) of binary: python")
    ranks = [outcome(0, 1, "gloo: connection closed", explained=False), outcome(1, None)]
    found = judge(tmp_path, 1, ranks, None, out_of_memory=True)
    for part in ("want of memory", "train.micro_batch_size", "goes on after the last checkpoint"):
        assert part in found.message
    (tmp_path / "agent.log").write_text("E1 failed (exitcode: -11) local_rank: 1 (pid: 7) of binary: python")
    assert "memory" not in judge(tmp_path, 1, ranks, None, out_of_memory=True).message


LOG = """\
/x/torch/nn.py:12: UserWarning: old function
  warnings.warn(
/x/megatron/a.py:3: DeprecationWarning: old name
what the rank printed
Fatal Python error: Segmentation fault
"""


def test_the_log_of_a_rank_without_a_word_is_shown_without_warnings(tmp_path):
    logs = tmp_path / "x" / "attempt_0" / "1"
    logs.mkdir(parents=True)
    (logs / "stderr.log").write_text(LOG)
    (tmp_path / "agent.log").write_text("E1 failed (exitcode: -11) local_rank: 1 (pid: 7) of binary: python")
    _, _, *shown = verdict(tmp_path, outcome(1, None)).message.splitlines()
    assert shown == ["[rank 1] what the rank printed", "[rank 1] Fatal Python error: Segmentation fault"]


def test_what_a_rank_said_is_shown_once(tmp_path):
    logs = tmp_path / "x" / "attempt_0" / "1"
    logs.mkdir(parents=True)
    (logs / "stderr.log").write_text(LOG + "rank 1: shard 3\n")
    message = verdict(tmp_path, outcome(1, 1, "shard 3")).message
    assert message == f"rank 1: shard 3\nrank 1's log: {logs / 'stderr.log'}"


def test_without_any_rank_the_launch_itself_did_not_work(tmp_path):
    (tmp_path / "agent.log").write_text("No module named torch\n")
    found = verdict(tmp_path)
    assert found.code == ExitCode.LAUNCH_UNAVAILABLE
    assert "[torchrun] No module named torch" in found.message


ENDS = st.lists(st.tuples(st.sampled_from(CODES), st.booleans()), max_size=4)


@given(ENDS, st.sampled_from([0, 1, -9]), st.sampled_from([None, signal.SIGTERM, signal.SIGINT]))
def test_every_end_has_one_of_our_codes_and_only_success_is_0(ends, agent, stopped_by):
    ranks = [outcome(rank, code, "why", explained=known) for rank, (code, known) in enumerate(ends)]
    found = verdict(Path("nowhere"), *ranks, agent=agent, stopped_by=stopped_by)
    assert isinstance(found.code, ExitCode)
    assert (found.code == ExitCode.OK) == (agent == 0)
    assert found.message or agent == 0


def test_a_rank_that_cannot_write_how_it_ended_says_so_and_why_it_ended(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(noted.DIRECTORY, str(tmp_path / "gone"))
    noted.conclude(3, 1, ExitCode.JOB_FAILED, "shard 3 is corrupt")
    said = capsys.readouterr().err
    assert "cannot write this rank's outcome" in said and "rank 3: shard 3 is corrupt" in said


def test_a_rank_puts_down_its_outcome_whole(tmp_path, monkeypatch):
    monkeypatch.setenv(noted.DIRECTORY, str(tmp_path))
    noted.conclude(3, 1, ExitCode.PATCHES, "patch x")
    (found,) = noted.read(tmp_path)
    assert (found.rank, found.pid, found.code, found.message) == (3, os.getpid(), 4, "patch x")
    assert [path.name for path in tmp_path.iterdir()] == ["rank-3.json"]
