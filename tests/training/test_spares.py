"""A job that loses a node and goes on with one that was spare."""

import json

import pytest

from bundle.launch import outcomes
from tests.command import finish
from tests.launch.launched import gone, reserved
from tests.training import nodes
from tests.training.verdicts import find_resumed_steps, read_verdict

pytestmark = pytest.mark.releases


def test_a_node_is_killed_and_the_job_goes_on_without_it_to_the_losses_of_an_undisturbed_run(tmp_path):
    pytest.importorskip("megatron.core")
    run = tmp_path / "run"
    with reserved() as port:
        three = [
            nodes.started(run, port, number, "--spares=1", "--devices-per-node=2") for number in range(3)
        ]
        nodes.until_saved(run, three)
        entries = [json.loads(path.read_text()) for path in (run / "logs/roster").glob("node-*.json")]
        numbered = {entry["token"]: entry["number"] for entry in entries}
        first, second = (
            numbered[token] for token in json.loads((run / "logs/roster/round-1.json").read_text())["members"]
        )
        # Where rank 0 is, which serves the store, writes the metrics and holds the run directory.
        three[first].kill()
        three[first].communicate()
        assert gone([each.pid for each in outcomes.read(run / "logs/node-0/1")])
        (spare,) = set(range(3)) - {first, second}
        said = {number: finish(three[number]) for number in (second, spare)}
    verdict = read_verdict(run, node=1)
    assert (verdict["kind"], verdict["node"]) == ("lost node", f"gpu{first}")
    assert verdict["sentence"] in said[second] and verdict["sentence"] not in said[spare]
    assert sum(bool(find_resumed_steps(text)) for text in said.values()) == 1
    assert nodes.numbers(run) == nodes.undisturbed(tmp_path / "whole", devices=4)
    assert nodes.numbers(run)[-1]["step"] == 30
