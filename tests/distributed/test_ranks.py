import os
import re
import signal
import sys
from datetime import timedelta

import pytest
import torch

from bundle.distributed import world
from bundle.distributed.world import StopRequest
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
    monkeypatch.setenv(outcomes.DIRECTORY, str(tmp_path))
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
    monkeypatch.setenv(outcomes.DIRECTORY, str(tmp_path))
    before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        assert not StopRequest(torch.device("cpu")).heard
        (tmp_path / outcomes.STOP).touch()
        assert StopRequest(torch.device("cpu")).heard
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


def test_a_hang_is_6_with_stacks_and_the_record_of_collectives(tmp_path):
    _, err = finish(start(tmp_path, WORKER, "hang", "asleep"), 6)
    assert "no progress for 2 s in step 4" in err
    assert "all_reduce" in (tmp_path / "dumps" / "hang-rank-0.txt").read_text()
    assert b"all_reduce" in (tmp_path / "dumps" / "hang-rank-0.flight").read_bytes()
    assert "in hang" in (tmp_path / "dumps" / "hang-rank-1.txt").read_text()


def test_a_stopped_rank_is_a_hang_that_names_it_and_does_not_survive(tmp_path):
    starter = start(tmp_path, WORKER, "hang", "stopped")
    _, err = finish(starter, 6)
    assert "rank 0: no progress" in err
    assert "no word from rank 1" in err
    assert gone([outcome.pid for outcome in outcomes.read(tmp_path / "logs")])


@pytest.mark.parametrize(
    ("where", "limit", "doing"), [("after", 2, "step 4"), ("inside", 4, "saving step 3")]
)
def test_a_hang_is_noticed_by_the_limit_of_where_it_began(tmp_path, where, limit, doing):
    _, err = finish(start(tmp_path, WORKER, "impatient", where), 6)
    said = re.search(r"no progress for (\d+) s in ([^;]*);", err)
    assert said is not None, err
    # The patience before it would have lasted 100 s.
    assert limit <= int(said[1]) < 30
    assert said[2] == doing
