import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from bundle.launch import outcomes
from tests.launch.launched import Terminal, finish, gone, start, wait_until_ready

WORKER = "tests.launch.worker"
pytestmark = pytest.mark.world


def test_arguments_reach_the_ranks_as_they_are_and_only_the_first_prints(tmp_path):
    hostile = ["$HOME", "${local_rank}", "$$", "; reboot", "a'b\"c", "", "--", "-x", "ü\n"]
    out, err = finish(start(tmp_path, WORKER, "well", *hostile), 0)
    assert out == f"rank 0 of 2 {hostile}\n"
    assert err == ""


def test_a_failing_rank_ends_the_others_and_its_words_are_the_message(tmp_path):
    _, err = finish(start(tmp_path, WORKER, "fail"), 1)
    log, said = err.splitlines()
    assert said == "rank 1: ValueError: corrupt shard 3; a restart does not mend this"
    assert "what the log says" in Path(log.removeprefix("rank 1's log: ")).read_text()


def test_the_code_of_a_rank_is_the_code_of_the_launch(tmp_path):
    _, err = finish(start(tmp_path, WORKER, "unfit"), 3)
    assert err == "rank 1: no such device; a restart does not mend this\n"


def test_a_killed_rank_is_named_and_ends_all_in_seconds_even_those_that_do_not_want_to(tmp_path):
    starter = start(tmp_path, WORKER, "stubborn")
    pids = wait_until_ready(tmp_path)
    os.kill(pids[1], signal.SIGKILL)
    _, err = finish(starter, 1, 15)
    assert err.splitlines()[-1] == (
        "rank 1: killed by SIGKILL: by somebody, or by the kernel when memory ran out (`dmesg` says so);"
        " the same command goes on after the last checkpoint"
    )
    assert json.loads((tmp_path / "logs" / "verdict.json").read_text())["kind"] == "killed"
    assert gone(pids)


@pytest.mark.parametrize("agent_too", [False, True])
def test_ranks_that_say_nothing_in_a_hang_are_ended_even_where_their_agent_never_sees_it(tmp_path, agent_too):
    starter = start(tmp_path, WORKER, "meet")
    pids = wait_until_ready(tmp_path)
    agent = int((tmp_path / "logs" / outcomes.AGENT_PID_FILE).read_text())
    for stopped in [pids[0], *([agent] if agent_too else [])]:
        os.kill(stopped, signal.SIGSTOP)
    (tmp_path / "world" / outcomes.HANG_FILE).touch()
    _, err = finish(starter, 6, 60)
    node = outcomes.get_node_name()
    assert err.splitlines()[-1] == (
        f"no progress: rank 0 on {node}: its process is stopped (SIGSTOP); rank 1 on {node}: it says nothing;"
        " the same command goes on after the last checkpoint"
    )
    assert json.loads((tmp_path / "logs" / "verdict.json").read_text())["kind"] == "hang"
    assert "does not end" not in err
    assert gone([agent, *pids])


def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path):
    starter = start(tmp_path, WORKER, "sleep")
    pids = wait_until_ready(tmp_path)
    agent = int((tmp_path / "logs" / outcomes.AGENT_PID_FILE).read_text())
    starter.kill()
    finish(starter, -signal.SIGKILL)
    assert gone([agent, *pids])


def test_sigterm_lets_the_ranks_save_and_ends_with_75(tmp_path):
    starter = start(tmp_path, WORKER, "wait_for_request")
    wait_until_ready(tmp_path)
    starter.send_signal(signal.SIGTERM)
    _, err = finish(starter, 75, 20)
    assert "saved step 7 on request" in err
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
    assert err == "ended by SIGINT before a checkpoint was complete\n"
    assert "Traceback" not in (tmp_path / "logs" / "agent.log").read_text()
    assert gone(pids)


def in_a_terminal(folder: Path, does: str) -> Terminal:
    return Terminal.of([sys.executable, "-m", "tests.launch.starter", "logs", WORKER, does], folder)


def test_ctrl_c_in_a_terminal_lets_the_ranks_save(tmp_path):
    terminal = in_a_terminal(tmp_path, "wait_for_request")
    wait_until_ready(tmp_path)
    terminal.ctrl_c()
    code, said = terminal.finish(20)
    assert (code, "saved step 7 on request" in said) == (75, True), said


def test_a_second_ctrl_c_ends_at_once_those_that_do_not_answer_the_first(tmp_path):
    terminal = in_a_terminal(tmp_path, "stubborn")
    pids = wait_until_ready(tmp_path)
    terminal.ctrl_c()
    wait_for_request(tmp_path)
    time.sleep(1)
    assert terminal.process.poll() is None
    terminal.ctrl_c()
    code, said = terminal.finish(10)
    assert (code, said) == (130, "ended by SIGINT before a checkpoint was complete\n")
    assert gone(pids)


def wait_for_request(folder: Path) -> None:
    deadline = time.monotonic() + 20
    while not (folder / "logs" / outcomes.STOP_FILE).exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_rank_that_cannot_even_start_is_shown_with_its_log(tmp_path):
    _, err = finish(start(tmp_path, WORKER, "no_such_function"), 1)
    assert "ended with code 1 and no word" in err
    assert "KeyError: 'no_such_function'" in err


def test_a_python_without_torch_is_said(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('no torch here')")
    _, err = finish(start(tmp_path, WORKER, "well"), 5)
    assert err.endswith("torchrun could not start the ranks; a restart does not mend this\n")
    assert "no torch here" in err


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
