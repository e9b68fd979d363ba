from typing import Any

import pytest

from tests.checkpoints.world import launch
from tests.world import Core

pytestmark = pytest.mark.world


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, installed: Core) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("faults")
    found: dict[str, Any] = launch("tests.checkpoints.faults", folder, 2, None, installed)
    return found


def test_a_truncated_checkpoint_falls_back_to_the_one_before_and_says_so(seen):
    assert seen["truncated"]["step"] == 2
    (note,) = seen["truncated"]["notes"]
    assert note == (
        "step-00000003 is damaged and was left out: megatron/__1_0.distcp is not what was written;"
        " it lies in damaged-step-00000003 now"
    )


def test_a_tampered_file_is_never_unpickled(seen):
    assert seen["tampered"]["step"] == 1
    assert "megatron/common.pt is not what was written" in seen["tampered"]["notes"][0]
    assert "megatron/common.pt is not what was written" in seen["foreign and tampered"]["text"]
    assert not seen["ran"]


@pytest.mark.parametrize("kind", ["code for an index", "code in the index", "code in common state"])
def test_code_in_a_checkpoint_never_runs_however_well_it_is_disguised(seen, kind):
    assert seen[kind]["error"] == "JobFailed"
    assert "cannot be loaded" in seen[kind]["text"]
    assert "Unsupported global" in seen[kind]["text"] or "holds pathlib.Path.touch" in seen[kind]["text"]
    assert not seen["ran"]


def test_when_all_are_damaged_each_is_named(seen):
    assert seen["all damaged"]["code"] == seen["two damaged"]["code"] == 1
    assert "step-00000001 is damaged and was left out: it has no manifest" in seen["all damaged"]["text"]
    for words in (
        "step-00000002 is damaged and was left out: random-00000.safetensors: No such file",
        "step-00000001 is damaged and was left out: it has no state.json",
        "--fresh",
    ):
        assert words in seen["two damaged"]["text"]


def test_a_foreign_checkpoint_is_read_as_data(seen):
    assert seen["foreign"]["step"] == 3


def test_a_checkpoint_of_another_model_is_refused_with_every_number(seen):
    assert seen["another model"]["code"] == 2
    assert "holds another model" in seen["another model"]["text"]
    for words in (
        "rotary_base: 10000.0 in the checkpoint, 20000.0",
        "norm_epsilon: 1e-06 in",
        "0.001 in the",
    ):
        assert words in seen["another model"]["text"]


def test_a_disk_that_is_full_for_random_states_ends_all_ranks_with_one_error(seen):
    assert "random-00000.safetensors: no room left to write" in seen["full disk at random states"]["text"]
    assert seen["full disk at random states"]["code"] == 1


def test_whatever_fails_on_one_rank_fails_on_all(seen):
    assert "rank 1: KeyError: 'nobody thought of it'" in seen["any error"]["text"]


def test_a_full_disk_is_one_clear_error_and_leaves_the_checkpoint_before(seen):
    assert "no room left to write" in seen["full disk"]["text"]
    assert seen["full disk"]["code"] == seen["busy full disk"]["code"] == 1
    assert "no room left" in seen["busy full disk"]["text"]
    assert seen["left behind"] == ["latest", "step-00000001"]
    assert seen["after full disk"]["step"] == 1


def test_without_checkpoints_there_is_nothing_to_load(seen):
    assert seen["none"] is None
