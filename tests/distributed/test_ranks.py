import json
import os
import re
import signal
import socket
import sys
from datetime import timedelta

import pytest
import torch

from bundle.distributed import world
from bundle.distributed.world import StopRequest
from bundle.environment import packages
from bundle.errors import LaunchUnavailable
from bundle.launch import outcomes
from bundle.launch.rendezvous import discover
from tests.launch.launched import Terminal, finish, gone, start, wait_for_ranks, wait_until_ready

WORKER = "tests.distributed.worker"
pytestmark = pytest.mark.world


def test_one_node_listens_on_loopback_only_and_every_rank_hears_a_request(tmp_path):
    out, _ = finish(start(tmp_path, WORKER, "collectives"), 0)
    assert out == "listeners=0100007F agreed=True\n"


def test_ranks_meet_although_somebody_has_taken_the_port_that_torchrun_found_free(tmp_path):
    out, _ = finish(start(tmp_path, WORKER, "crowded"), 0)
    assert out == "2 ranks met\n"


def test_a_rank_that_is_not_told_where_rank_0_listens_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv(outcomes.DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    counted = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    me = discover({**counted, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    with pytest.raises(LaunchUnavailable, match=r"cannot reach .*: rank 0 did not say in .*port where"):
        world.open_store(me, timedelta(seconds=0.2))


def test_sigterm_to_the_launcher_stops_all_ranks_at_the_same_step(tmp_path):
    starter = start(tmp_path, WORKER, "stop")
    wait_until_ready(tmp_path)
    starter.send_signal(signal.SIGTERM)
    _, err = finish(starter, 75, 30)
    assert err == "saved\n"


def test_a_request_that_the_launcher_heard_before_this_rank_could_is_heard(tmp_path, monkeypatch):
    monkeypatch.setenv(outcomes.DIRECTORY_VARIABLE, str(tmp_path))
    before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        assert not StopRequest(torch.device("cpu")).is_requested
        (tmp_path / outcomes.STOP_FILE).touch()
        assert StopRequest(torch.device("cpu")).is_requested
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def test_ctrl_c_in_the_terminal_of_somebodys_torchrun_stops_its_ranks_at_the_same_step(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", WORKER, "stop"]
    terminal = Terminal.of(command, tmp_path, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    wait_for_ranks(tmp_path)
    terminal.ctrl_c()
    code, said = terminal.finish()
    assert code != 0 and all(f"rank {rank}: saved" in said for rank in (0, 1)), said


def test_a_rank_killed_inside_a_collective_ends_the_job(tmp_path):
    starter = start(tmp_path, WORKER, "stop")
    pids = wait_until_ready(tmp_path)
    os.kill(pids[0], signal.SIGKILL)
    _, err = finish(starter, 1, 30)
    assert "rank 0: killed by SIGKILL" in err
    assert gone(pids)


def sentence(said: str) -> str:
    """The sentence of a launch, without what differs from time to time and from machine to machine."""
    said = re.sub(r"no progress for \d+ s", "no progress for N s", said.splitlines()[-1])
    said = re.sub(r"group \d\d\b", "group N", said)
    return re.sub(r"\(\w+\.py:\d+\)", "(FILE:LINE)", said.replace(socket.gethostname(), "HERE"))


HANGS = {
    "asleep": "it is at `read_without_end` (FILE:LINE), in step 4",
    "patient": "it is at `read_without_end` (FILE:LINE), in reading the data",
    "stopped": "its process is stopped (SIGSTOP)",
}


@pytest.mark.parametrize("how", HANGS)
def test_a_hang_is_6_and_says_who_never_came_to_which_collective_and_what_it_does_instead(tmp_path, how):
    _, err = finish(start(tmp_path, WORKER, "hang", how), 6, 180)
    assert sentence(err) == (
        "no progress for N s: rank 0 in all_reduce of 2x3 number 2 of group 1 TENSOR_PARALLEL, at `hang`"
        f" (FILE:LINE), in step 4; rank 1 on HERE never came: {HANGS[how]}; the same command goes on after"
        " the last checkpoint"
    )
    verdict = json.loads((tmp_path / "logs" / "verdict.json").read_text())
    assert (verdict["kind"], verdict["rank"], verdict["action"]) == ("hang", 1, "restart")
    assert "all_reduce" in (tmp_path / "dumps" / "hang-rank-0.txt").read_text()
    assert b"all_reduce" in (tmp_path / "dumps" / "hang-rank-0.flight").read_bytes()
    assert gone([outcome.pid for outcome in outcomes.read(tmp_path / "logs")])


def test_mtp_losses_that_one_context_parallel_rank_reduces_alone_are_a_hang_that_names_both(tmp_path):
    core = pytest.importorskip("megatron.core")
    if not packages.is_within(core.__version__, "<0.19"):
        pytest.skip("the tracker is called otherwise from 0.19 on")
    _, err = finish(start(tmp_path, WORKER, "alone"), 6, 180)
    assert sentence(err) == (
        "no progress for N s: ranks wait for each other: rank 0 on HERE: in all_reduce of 1 number 1 of group"
        " N, at `reduce_loss_in_tracker` (FILE:LINE), in step 4; rank 1 on HERE: in broadcast of 4 number 1"
        " of all ranks, at `alone` (FILE:LINE), in step 5; the same command goes on after the last checkpoint"
    )


@pytest.mark.parametrize(
    ("where", "limit", "doing"), [("after", 2, "step 4"), ("inside", 4, "saving step 3")]
)
def test_a_hang_is_noticed_by_the_limit_of_where_it_began(tmp_path, where, limit, doing):
    _, err = finish(start(tmp_path, WORKER, "impatient", where), 6)
    said = re.search(r"no progress for (\d+) s: rank 0 on \S+: at [^;]*, in ([^;]*);", err)
    assert said is not None, err
    # The patience before it would have lasted 100 s.
    assert limit <= int(said[1]) < 30
    assert said[2] == doing
