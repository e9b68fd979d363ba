import os
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from bundle.distributed import world
from bundle.distributed.world import StopRequest
from bundle.environment import packages
from bundle.errors import TargetUnavailable
from bundle.launch import hang, outcomes
from bundle.launch.hang import Collective, RankSnapshot
from bundle.launch.rendezvous import discover
from tests.launch.launched import (
    Terminal,
    finish,
    gone,
    read_verdict,
    start,
    wait_for_ranks,
    wait_until_ready,
)

WORKER = "tests.distributed.worker"
EVERYONE = "the group of all ranks"
REDUCTIONS = ("all_reduce of shape 2x3", "all_reduce of shape 1")
pytestmark = pytest.mark.world


def test_one_node_listens_on_loopback_only_and_every_rank_hears_a_request(tmp_path):
    out, _ = finish(start(tmp_path, WORKER, "collectives"), 0)
    assert out == "listeners=0100007F agreed=True\n"


def test_ranks_meet_although_somebody_has_taken_the_port_that_torchrun_found_free(tmp_path):
    out, _ = finish(start(tmp_path, WORKER, "crowded"), 0)
    assert out == "2 ranks met\n"


def test_a_rank_that_is_not_told_where_rank_0_listens_says_so(tmp_path, monkeypatch, messages):
    monkeypatch.setenv(outcomes.LAUNCH_FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    counted = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    me = discover({**counted, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    with pytest.raises(TargetUnavailable, match=f"{tmp_path}/{world.PORT_FILE}") as failed:
        world.open_store(me, timedelta(seconds=0.2))
    messages(failed.value)


def test_sigterm_to_the_launcher_stops_all_ranks_at_the_same_step(tmp_path):
    starter = start(tmp_path, WORKER, "stop")
    wait_until_ready(tmp_path)
    starter.send_signal(signal.SIGTERM)
    _, err = finish(starter, 75, 30)
    assert err == "saved\n"


def test_a_request_that_the_launcher_heard_before_this_rank_could_is_heard(tmp_path, monkeypatch):
    monkeypatch.setenv(outcomes.LAUNCH_FOLDER_VARIABLE, str(tmp_path))
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
    verdict = read_verdict(tmp_path)
    assert err.splitlines()[-1] == verdict["sentence"]
    assert (verdict["kind"], verdict["rank"], verdict["action"]) == ("killed", 0, "restart")
    assert gone(pids)


def read_hang(folder: Path, err: str, rank: int | None) -> list[RankSnapshot]:
    """Return where the ranks of a launch stood, whose verdict is that it hangs because of `rank`."""
    verdict = read_verdict(folder)
    assert (verdict["kind"], verdict["rank"], verdict["action"]) == ("hang", rank, "restart")
    assert err.splitlines()[-1] == verdict["sentence"]
    snapshots = hang.read(folder / "dumps")
    assert hang.summarize_hang(snapshots).text in verdict["cause"]
    return snapshots


@pytest.mark.parametrize(
    ("how", "doing"), [("asleep", "step 4"), ("patient", "reading the data"), ("stopped", "")]
)
def test_a_hang_is_6_and_says_who_never_came_to_which_collective_and_what_it_does_instead(
    tmp_path, how, doing
):
    _, err = finish(start(tmp_path, WORKER, "hang", how), 6, 180)
    waiting, absent = read_hang(tmp_path, err, 1)
    assert waiting.waits == Collective("group 1 TENSOR_PARALLEL", (0, 1), 2, REDUCTIONS[0])
    assert waiting.frame.startswith("`hang`") and waiting.doing == "step 4"
    assert absent.doing == doing and absent.node == socket.gethostname()
    assert ("SIGSTOP" if how == "stopped" else "read_without_end") in f"{absent.silent}{absent.frame}"
    assert "all_reduce" in (tmp_path / "dumps" / "hang-rank-0.txt").read_text()
    assert b"all_reduce" in (tmp_path / "dumps" / "hang-rank-0.flight").read_bytes()
    assert gone([outcome.pid for outcome in outcomes.read(tmp_path / "logs")])


def test_mtp_losses_that_one_context_parallel_rank_reduces_alone_are_a_hang_that_names_both(tmp_path):
    core = pytest.importorskip("megatron.core")
    if not packages.is_base_version_within(core.__version__, "<0.19"):
        pytest.skip("the tracker is called otherwise from 0.19 on")
    _, err = finish(start(tmp_path, WORKER, "alone"), 6, 180)
    first, second = read_hang(tmp_path, err, None)
    assert first.waits is not None and first.waits.description == REDUCTIONS[1]
    assert first.frame.startswith("`reduce_loss") and first.doing == "step 4"
    assert second.waits == Collective(EVERYONE, (0, 1), 1, "broadcast of shape 4")
    assert second.frame.startswith("`alone`") and second.doing == "step 5"


@pytest.mark.parametrize(
    ("where", "limit", "doing"), [("after", 2, "step 4"), ("inside", 4, "saving step 3")]
)
@pytest.mark.slow
def test_a_hang_is_noticed_by_the_limit_of_where_it_began(tmp_path, where, limit, doing):
    finish(start(tmp_path, WORKER, "impatient", where), 6)
    first, *_ = hang.read(tmp_path / "logs")
    # The patience before it would have lasted 100 s.
    assert limit <= first.seconds < 30
    assert first.doing == doing


def test_no_group_is_bound_to_a_device_so_that_none_is_connected_before_its_use(monkeypatch):
    arguments = {}
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **given: arguments.update(given))
    store, minute = torch.distributed.HashStore(), timedelta(minutes=1)
    world.initialize(discover({}), store, "nccl", minute)
    assert arguments["timeout"] == minute
    assert arguments.get("device_id") is None
