import json
from typing import Any

import pytest

from tests.checkpoints.world import launch
from tests.world import Core

pytestmark = pytest.mark.world


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, installed: Core) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("faults")
    found = json.dumps(launch("tests.checkpoints.faults", folder, 2, None, installed))
    seen: dict[str, Any] = json.loads(found.replace(str(folder), "TMP"))
    return seen


def test_a_truncated_checkpoint_falls_back_to_the_one_before_and_says_so(seen, messages):
    assert seen["truncated"]["step"] == 2
    (note,) = seen["truncated"]["notes"]
    assert "megatron/__1_0.distcp" in note and "damaged-step-00000003" in note
    messages(note)


def test_a_tampered_file_is_never_unpickled(seen, messages):
    assert seen["tampered"]["step"] == 1
    for message in (seen["tampered"]["notes"][0], seen["foreign and tampered"]["text"]):
        assert "megatron/common.pt" in message
        messages(message)
    assert not seen["ran"]


@pytest.mark.parametrize("kind", ["code for an index", "code in the index", "code in common state"])
def test_code_in_a_checkpoint_never_runs_however_well_it_is_disguised(seen, kind):
    assert seen[kind]["error"] == "JobFailed"
    assert "cannot be loaded" in seen[kind]["text"]
    assert "Unsupported global" in seen[kind]["text"] or "pathlib.Path.touch" in seen[kind]["text"]
    assert not seen["ran"]


def test_when_all_are_damaged_each_is_named(seen, messages):
    assert seen["all damaged"]["code"] == seen["two damaged"]["code"] == 1
    assert "step-00000001" in seen["all damaged"]["text"] and "manifest" in seen["all damaged"]["text"]
    for name in ("step-00000002", "random-00000.safetensors", "step-00000001", "state.json", "--fresh"):
        assert name in seen["two damaged"]["text"]
    messages(seen["all damaged"]["text"])
    messages(seen["two damaged"]["text"])


def test_a_foreign_checkpoint_is_read_as_data(seen):
    assert seen["foreign"]["step"] == 3


def test_a_checkpoint_of_another_model_is_refused_with_every_number(seen, messages):
    assert seen["another model"]["code"] == 2
    for value in ("rotary_base", "10000.0", "20000.0", "norm_epsilon", "1e-06", "0.001"):
        assert value in seen["another model"]["text"]
    messages(seen["another model"]["text"])


def test_a_disk_that_is_full_for_random_states_ends_all_ranks_with_one_error(seen):
    outcome = seen["full disk at random states"]
    assert outcome["code"] == 1 and "random-00000.safetensors" in outcome["text"]


def test_whatever_fails_on_one_rank_fails_on_all(seen):
    assert "rank 1: KeyError" in seen["any error"]["text"]


def test_a_full_disk_is_one_clear_error_and_leaves_the_checkpoint_before(seen):
    for kind in ("full disk", "busy full disk"):
        assert seen[kind]["code"] == 1 and "no room" in seen[kind]["text"]
    assert seen["left behind"] == ["latest", "step-00000001"]
    assert seen["after full disk"]["step"] == 1


def test_without_checkpoints_there_is_nothing_to_load(seen):
    assert seen["none"] is None
