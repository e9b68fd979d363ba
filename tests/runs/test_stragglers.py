"""Who is slow while a run trains."""

import time

import pytest
import torch

from bundle.engine.forward_timer import ForwardTimer
from bundle.launch import outcomes
from bundle.runs.stragglers import find_slowest_rank_ratio_median
from tests.world import World


def test_the_slowest_rank_is_held_against_the_middle_of_its_stage():
    rank, ratio, usual = find_slowest_rank_ratio_median([0.2, 0.21, 0.5, 0.2], [0, 0, 0, 0])
    assert (rank, ratio, usual) == (2, 2.5, 0.2)
    # A stage that has more to do is no straggler, whoever is beside it.
    assert find_slowest_rank_ratio_median([0.2, 0.2, 0.6, 0.62], [0, 0, 1, 1])[0] == 3
    assert find_slowest_rank_ratio_median([0.2, 0.2, 0.6, 0.62], [0, 0, 1, 1])[1] == pytest.approx(0.62 / 0.6)
    # Of two, the faster one is the middle.
    assert find_slowest_rank_ratio_median([0.9, 0.3], [0, 0]) == (0, 3.0, 0.3)


def test_where_no_two_ranks_can_be_compared_nobody_is_slow():
    assert find_slowest_rank_ratio_median([0.2, 0.9], [0, 1])[0] is None
    assert find_slowest_rank_ratio_median([0.0, 0.0], [0, 0])[0] is None


def test_what_a_rank_notices_is_kept_for_the_verdict_and_only_the_last_of_it(tmp_path, monkeypatch):
    outcomes.record_notice("nobody of ours started this rank")
    monkeypatch.setenv(outcomes.LAUNCH_FOLDER_VARIABLE, str(tmp_path))
    for step in range(9):
        outcomes.record_notice(f"step {step}")
    assert outcomes.read_recent_notices(tmp_path) == ("step 5", "step 6", "step 7", "step 8")
    assert outcomes.read_recent_notices(tmp_path / "none") == ()


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
    took = pace.take_seconds_if_supported()
    assert took is not None and 0.02 <= took < 0.45
    assert pace.take_seconds_if_supported() == 0.0
    elsewhere = ForwardTimer(torch.device("meta"))
    with elsewhere:
        pass
    assert elsewhere.take_seconds_if_supported() is None
