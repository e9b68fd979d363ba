from typing import Any

import pytest

from tests.training.checkpoints.world import launch

pytestmark = pytest.mark.world


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("megatron.core")
    folder = tmp_path_factory.mktemp("faults")
    found: dict[str, Any] = launch("tests.training.checkpoints.faults", folder, 2, None)
    return found


def test_a_truncated_checkpoint_falls_back_to_the_one_before_and_says_so(seen):
    assert seen["truncated"]["step"] == 2
    (note,) = seen["truncated"]["notes"]
    assert note == (
        "step-00000003 is damaged and was left out: megatron/__1_0.distcp is not what was written"
    )


def test_a_tampered_file_is_never_unpickled(seen):
    assert seen["tampered"]["step"] == 1
    assert "megatron/common.pt is not what was written" in seen["tampered"]["notes"][1]
    assert "megatron/common.pt is not what was written" in seen["trusted but tampered"]["text"]
    assert not seen["ran"]


def test_when_all_are_damaged_each_is_named(seen):
    assert seen["all damaged"]["code"] == 1
    for words in (
        "step-00000003",
        "step-00000002",
        "step-00000001 is damaged",
        "it has no manifest",
        "--fresh",
    ):
        assert words in seen["all damaged"]["text"]


def test_a_foreign_checkpoint_needs_trust(seen):
    assert seen["foreign"]["code"] == 2
    assert "--trust-checkpoint" in seen["foreign"]["text"]
    assert seen["trusted"]["step"] == 3


def test_a_full_disk_is_one_clear_error_and_leaves_the_checkpoint_before(seen):
    assert "no room left to write" in seen["full disk"]["text"]
    assert seen["full disk"]["code"] == 1
    assert seen["left behind"] == ["latest", "step-00000001"]
    assert seen["after full disk"]["step"] == 1


def test_without_checkpoints_there_is_nothing_to_load(seen):
    assert seen["none"] is None
