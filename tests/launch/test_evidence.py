"""What is gathered of a launch that ended: its log folder, and the kernel's log."""

import secrets
from pathlib import Path

import pytest

from bundle.launch import outcomes
from bundle.launch.evidence import KernelLogTail, gather_evidence
from bundle.launch.outcomes import RankState
from bundle.launch.rendezvous import discover

KERNEL = Path("/dev/kmsg")


def test_the_kernels_log_is_read_from_the_moment_on():
    before, after = (f"mcore-bundle test {secrets.token_hex(8)}" for _ in range(2))
    try:
        KERNEL.write_text(f"{before}\n")
        log = KernelLogTail()
        KERNEL.write_text(f"{after}\n")
    except OSError as error:
        pytest.skip(f"the kernel's log is not ours: {error.strerror}")
    lines = log.read_new_lines()
    log.close()
    assert after in lines and before not in lines
    assert log.read_new_lines() == ()


def test_where_nobody_may_read_the_kernels_log_it_says_nothing(tmp_path):
    log = KernelLogTail(tmp_path / "kmsg")
    assert log.read_new_lines() == ()
    log.close()


def test_a_log_folder_is_read_with_the_end_of_every_log(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "gpu07")
    monkeypatch.setenv(outcomes.LAUNCH_FOLDER_VARIABLE, str(tmp_path))
    outcomes.write(RankState(5, 1, 4711, 1.0, 1, "broke"))
    (tmp_path / "agent.log").write_bytes(b"what torchrun \xff said")
    folder = tmp_path / "ranks_x" / "attempt_0" / "1"
    folder.mkdir(parents=True)
    (folder / "stderr.log").write_text("early\n" + "x" * (1 << 20) + "\nthe last word\n")
    meeting = discover({}, nodes=2, node_rank=1, endpoint="node0:29500")
    found = gather_evidence(tmp_path, meeting, 4, 1, kernel_lines=("a line",))
    assert (found.node, found.node_rank, found.nodes, found.per_node) == ("gpu07", 1, 2, 4)
    assert found.outcomes == (RankState(5, 1, 4711, 1.0, 1, "broke"),)
    assert found.agent_log == "what torchrun � said" and found.kernel_lines == ("a line",)
    assert found.logs[1].path == folder / "stderr.log"
    assert found.logs[1].tail.endswith("the last word\n") and "early" not in found.logs[1].tail
    assert gather_evidence(tmp_path / "none", meeting, 4, 1).logs == {}
