"""What a trainer hands to the parts that it is made of."""

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
