"""Nodes of a job that start again in place together, though the ranks of one notice nothing."""

import os
import signal

import pytest

from bundle.launch import outcomes
from tests.command import finish
from tests.launch.launched import reserved
from tests.training import nodes
from tests.training.verdicts import find_resumed_steps, read_verdict

pytestmark = pytest.mark.releases


def test_the_node_that_broke_waits_for_the_one_that_did_not_notice_and_both_meet_anew(tmp_path):
    pytest.importorskip("megatron.core")
    run = tmp_path / "run"
    with reserved() as port:
        both = [
            nodes.started(run, port, number, "--restarts=3", "--devices-per-node=1") for number in range(2)
        ]
        nodes.until_saved(run, both)
        (first,), (second,) = (outcomes.read(run / f"logs/node-{number}/1") for number in range(2))
        os.kill(first.pid, signal.SIGSTOP)  # which serves the store
        os.kill(second.pid, signal.SIGKILL)
        said = [finish(node) for node in both]
    for number in range(2):
        verdict = read_verdict(run, number)
        assert (verdict["kind"], verdict["rank"], verdict["node"]) == ("killed", 1, "gpu1")
        assert verdict["sentence"] in said[number]
    assert find_resumed_steps(said[0])
    assert len(list((run / "logs").glob("world-*"))) == 2
    assert {path.name for path in (run / "logs").glob("node-*/*")} == {"1", "2"}
    assert nodes.numbers(run) == nodes.undisturbed(tmp_path / "whole", devices=2)
    assert nodes.numbers(run)[-1]["step"] == 30
