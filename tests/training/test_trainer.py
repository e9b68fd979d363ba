"""What a trainer hands to the parts that it is made of."""

import json
from pathlib import Path

import pytest

from tests.world import World

pytestmark = pytest.mark.world


def test_the_engine_gets_the_kernel_that_was_planned_and_not_auto(tmp_path: Path) -> None:
    """By `auto` every rank would choose by its own device."""
    pytest.importorskip("megatron.core")
    with World() as world:
        (said,) = world.run("tests.training.rank", 1, str(tmp_path))
    asked, planned, given = said.split()[-3:]
    assert asked == "auto" and planned == given != "auto"


def test_padding_of_rows_is_no_token(tmp_path: Path) -> None:
    """Neither what balances experts nor what steers them sees it, as little as the loss does."""
    pytest.importorskip("megatron.core")
    with World() as world:
        (said,) = world.run("tests.training.padded", 1, str(tmp_path))
    found = json.loads(said.splitlines()[-1])
    assert found["lengths"] and found["tokens"] < 1024  # of 2048
    assert found["biases"] == 0 and found["loss"] < 1e-5 and found["gradients"] < 1e-6
