import os
import resource
import signal
import sys
import time
from pathlib import Path

import pytest

from bundle.launch import outcomes
from tests.launch.launched import Terminal, finish, gone, read_verdict, start, wait_until_ready

WORKER = "tests.launch.worker"
pytestmark = pytest.mark.world


def test_arguments_reach_the_ranks_as_they_are_and_only_the_first_prints(tmp_path):
    hostile = ["$HOME", "${local_rank}", "$$", "; reboot", "a'b\"c", "", "--", "-x", "ü\n"]
    out, err = finish(start(tmp_path, WORKER, "well", *hostile), 0)
    assert out == f"rank 0 of 2 {hostile}\n"
    assert err == ""


def test_nothing_temporary_stays_of_a_launch(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    finish(start(tmp_path, WORKER, "well"), 0)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_ranks_may_open_as_many_files_as_the_hard_limit_allows(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        starter = start(tmp_path, WORKER, "count_files")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    out, _ = finish(starter, 0)
    assert int(out) == min(hard, 1 << 20) > 300


def test_a_failing_rank_ends_the_others_and_its_words_are_the_message(tmp_path):
    _, err = finish(start(tmp_path, WORKER, "fail"), 1)
    log, said = err.splitlines()
    verdict = read_verdict(tmp_path)
    assert said == verdict["sentence"] and "corrupt shard 3" in said
    assert (verdict["rank"], verdict["kind"], verdict["action"]) == (1, "exception", "stop")
    assert "the log" in Path(log.removeprefix("rank 1's log: ")).read_text()


def test_the_code_of_a_rank_is_the_code_of_the_launch(tmp_path):
    _, err = finish(start(tmp_path, WORKER, "unfit"), 3)
    verdict = read_verdict(tmp_path)
    assert err == f"{verdict['sentence']}\n" and "such device" in err
    assert (verdict["rank"], verdict["kind"], verdict["action"]) == (1, "refused", "stop")


def test_a_killed_rank_is_named_and_ends_all_in_seconds_even_those_that_do_not_want_to(tmp_path):
    starter = start(tmp_path, WORKER, "stubborn")
    pids = wait_until_ready(tmp_path)
    os.kill(pids[1], signal.SIGKILL)
    _, err = finish(starter, 1, 15)
    verdict = read_verdict(tmp_path)
    assert err.splitlines()[-1] == verdict["sentence"] and "SIGKILL" in verdict["cause"]
    assert (verdict["rank"], verdict["kind"], verdict["action"]) == (1, "killed", "restart")
    assert gone(pids)


@pytest.mark.parametrize("agent_too", [False, True])
@pytest.mark.slow
def test_ranks_that_say_nothing_in_a_hang_are_ended_even_where_their_agent_never_sees_it(tmp_path, agent_too):
    starter = start(tmp_path, WORKER, "meet")
    pids = wait_until_ready(tmp_path)
    agent = int((tmp_path / "logs" / outcomes.AGENT_PID_FILE).read_text())
    for stopped in [pids[0], *([agent] if agent_too else [])]:
        os.kill(stopped, signal.SIGSTOP)
    (tmp_path / "world" / outcomes.HANG_FILE).touch()
    _, err = finish(starter, 6, 60)
    verdict = read_verdict(tmp_path)
    assert err.splitlines()[-1] == verdict["sentence"]
    assert (verdict["kind"], verdict["action"]) == ("hang", "restart")
    stopped, silent = verdict["cause"].split("; ")
    node = outcomes.get_node_name()
    assert f"rank 0 on {node}" in stopped and "SIGSTOP" in stopped
    assert f"rank 1 on {node}" in silent and "SIGSTOP" not in silent
    assert "does not end" not in err
    assert gone([agent, *pids])


def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path):
    starter = start(tmp_path, WORKER, "sleep")
    pids = wait_until_ready(tmp_path)
    agent = int((tmp_path / "logs" / outcomes.AGENT_PID_FILE).read_text())
    starter.kill()
    finish(starter, -signal.SIGKILL)
    assert gone([agent, *pids])


def test_a_launcher_ends_the_ranks_of_an_agent_that_was_killed_before_it_ends(tmp_path):
    starter = start(tmp_path, WORKER, "unbound")
    pids = wait_until_ready(tmp_path)
    os.kill(int((tmp_path / "logs" / outcomes.AGENT_PID_FILE).read_text()), signal.SIGKILL)
    finish(starter, 1, 20)
    assert gone(pids, 0)


def test_sigterm_lets_the_ranks_save_and_ends_with_75(tmp_path):
    starter = start(tmp_path, WORKER, "wait_for_request")
    wait_until_ready(tmp_path)
    starter.send_signal(signal.SIGTERM)
    _, err = finish(starter, 75, 20)
    assert "step 7" in err and read_verdict(tmp_path)["kind"] == "preempted"
    assert "Traceback" not in (tmp_path / "logs" / "agent.log").read_text()


def test_a_request_before_the_ranks_are_ready_is_not_lost(tmp_path):
    starter = start(tmp_path, WORKER, "wait_for_request")
    while not (tmp_path / "logs" / outcomes.AGENT_PID_FILE).exists():
        time.sleep(0.01)
    starter.send_signal(signal.SIGTERM)
    finish(starter, 75)


def test_a_request_at_the_moment_of_the_start_is_not_lost(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_STOPPED_AT_ONCE", "1")
    finish(start(tmp_path, WORKER, "wait_for_request"), 75)


def test_ctrl_c_before_ranks_can_save_is_130_and_leaves_nothing(tmp_path):
    starter = start(tmp_path, WORKER, "sleep")
    pids = wait_until_ready(tmp_path)
    starter.send_signal(signal.SIGINT)
    _, err = finish(starter, 130, 20)
    verdict = read_verdict(tmp_path)
    assert err == f"{verdict['sentence']}\n" and "SIGINT" in err
    assert (verdict["kind"], verdict["action"]) == ("stopped", "restart")
    assert "Traceback" not in (tmp_path / "logs" / "agent.log").read_text()
    assert gone(pids)


def in_a_terminal(folder: Path, does: str) -> Terminal:
    return Terminal.of([sys.executable, "-m", "tests.launch.starter", "logs", WORKER, does], folder)


def test_ctrl_c_in_a_terminal_lets_the_ranks_save(tmp_path):
    terminal = in_a_terminal(tmp_path, "wait_for_request")
    wait_until_ready(tmp_path)
    terminal.ctrl_c()
    code, said = terminal.finish(20)
    assert (code, "step 7" in said) == (75, True), said


def test_a_second_ctrl_c_ends_at_once_those_that_do_not_answer_the_first(tmp_path):
    terminal = in_a_terminal(tmp_path, "stubborn")
    pids = wait_until_ready(tmp_path)
    terminal.ctrl_c()
    wait_for_request(tmp_path)
    time.sleep(1)
    assert terminal.process.poll() is None
    terminal.ctrl_c()
    code, said = terminal.finish(10)
    assert (code, said) == (130, f"{read_verdict(tmp_path)['sentence']}\n")
    assert gone(pids)


def wait_for_request(folder: Path) -> None:
    deadline = time.monotonic() + 20
    while not (folder / "logs" / outcomes.STOP_FILE).exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_rank_that_cannot_even_start_is_shown_with_its_log(tmp_path):
    _, err = finish(start(tmp_path, WORKER, "absent"), 1)
    verdict = read_verdict(tmp_path)
    assert (verdict["kind"], verdict["action"]) == ("exception", "stop") and "code 1" in verdict["cause"]
    assert err.splitlines()[-1] == verdict["sentence"]
    assert "KeyError: 'absent'" in err


def test_a_python_without_torch_is_said(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('no torch here')")
    _, err = finish(start(tmp_path, WORKER, "well"), 5)
    verdict = read_verdict(tmp_path)
    assert err.endswith(f"{verdict['sentence']}\n") and "no torch here" in err
    assert (verdict["kind"], verdict["action"], verdict["rank"]) == ("launch", "stop", None)


def test_a_launch_that_nohup_started_does_not_hear_the_terminal_go(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    starter = start(tmp_path, WORKER, "wait_for_request")
    signal.signal(signal.SIGHUP, before)
    wait_until_ready(tmp_path)
    starter.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert not (tmp_path / "logs" / outcomes.STOP_FILE).exists()
    starter.send_signal(signal.SIGTERM)
    finish(starter, 75, 20)
