"""What is unusual while a run trains: who is slow, and which losses jump."""

import re
import time

import pytest
import torch

from bundle.engine.forward_timer import ForwardTimer
from bundle.launch import outcomes
from bundle.runs.anomalies import LossSpikes, find_slowest
from tests.world import World


def test_the_slowest_rank_is_held_against_the_middle_of_its_stage():
    rank, ratio, usual = find_slowest([0.2, 0.21, 0.5, 0.2], [0, 0, 0, 0])
    assert (rank, ratio, usual) == (2, 2.5, 0.2)
    # A stage that has more to do is no straggler, whoever is beside it.
    assert find_slowest([0.2, 0.2, 0.6, 0.62], [0, 0, 1, 1])[0] == 3
    assert find_slowest([0.2, 0.2, 0.6, 0.62], [0, 0, 1, 1])[1] == pytest.approx(0.62 / 0.6)
    # Of two, the faster one is the middle.
    assert find_slowest([0.9, 0.3], [0, 0]) == (0, 3.0, 0.3)


def test_where_no_two_ranks_can_be_compared_nobody_is_slow():
    assert find_slowest([0.2, 0.9], [0, 1])[0] is None
    assert find_slowest([0.0, 0.0], [0, 0])[0] is None


@pytest.fixture
def noticed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(outcomes, "record_notice", told.append)
    return told


def falling(count: int) -> list[float]:
    """Losses as a run has them: they fall, and go up and down a little."""
    return [4.0 - 0.01 * step + 0.02 * (step % 3) for step in range(count)]


def test_a_loss_that_jumps_is_told_once_and_counted(noticed, messages):
    spikes = LossSpikes()
    for step, loss in enumerate([*falling(20), 9.0, *falling(20)], start=1):
        seen = spikes.measure(step, loss)
    assert seen == {"train/loss_spikes": 1}
    (notice,) = noticed
    assert re.findall(r"\d[\d.]*", notice) == ["21", "9", "3.925", "20"]
    messages(notice)


@pytest.mark.parametrize(
    "losses",
    [
        falling(60),
        [4.0] * 20 + [4.001],  # what does not move at all moves a little
        [4.0, 9.0],  # too few to know what is usual
        [*falling(20), 1.0],  # a fall
        [*falling(20), float("nan")],  # which train.on_nan is about
        [10.0 / step for step in range(1, 40)],
    ],
)
def test_what_losses_usually_do_is_no_spike(noticed, losses):
    spikes = LossSpikes()
    for step, loss in enumerate(losses, start=1):
        spikes.measure(step, loss)
    assert noticed == [] and spikes.count == 0


def test_what_a_rank_notices_is_kept_for_the_verdict_and_only_the_last_of_it(tmp_path, monkeypatch):
    outcomes.record_notice("nobody of ours started this rank")
    monkeypatch.setenv(outcomes.DIRECTORY_VARIABLE, str(tmp_path))
    for step in range(9):
        outcomes.record_notice(f"step {step}")
    assert outcomes.read_notices(tmp_path) == ("step 5", "step 6", "step 7", "step 8")
    assert outcomes.read_notices(tmp_path / "none") == ()


@pytest.mark.world
def test_a_rank_that_is_slow_in_two_reports_in_a_row_is_named_once_by_rank_0():
    with World() as world:
        first, *others = (
            said.splitlines() for said in world.run("tests.training.straggling", 3, "2", "4", "5", "6")
        )
    told, slow, usual = first.pop(4), *(str({"train/straggler_ratio": ratio}) for ratio in (4.0, 1.0))
    assert first == [usual, slow, usual, slow, slow, slow]
    assert told.startswith(f"step 5: rank 1 on {outcomes.get_node_name()} ")
    assert "0.5 s" in told and "0.125 s" in told
    assert others == [["{}"] * 6] * 2


def test_only_what_trains_is_timed():
    pace = ForwardTimer(torch.device("cpu"))
    with pace:
        time.sleep(0.02)
    time.sleep(0.05)
    with torch.no_grad(), pace:
        time.sleep(0.5)
    took = pace.take_seconds()
    assert took is not None and 0.02 <= took < 0.45
    assert pace.take_seconds() == 0.0
    elsewhere = ForwardTimer(torch.device("meta"))
    with elsewhere:
        pass
    assert elsewhere.take_seconds() is None
