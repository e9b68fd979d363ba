"""Every optimizer steps as its formula says, whatever data-parallel, tensor or pipeline ranks share."""

import pytest

from tests.engine.optimizers import AGREES, CASES, LAYOUTS
from tests.engine.test_layouts import seen_by, wrong


@pytest.mark.world
def test_steps_are_those_of_the_formula(core):
    over = {f"tests.engine.optimizers:{case} in {layout}": 2 for case in CASES for layout in LAYOUTS}
    assert not wrong(seen_by(core, over), AGREES)


@pytest.mark.world
def test_steps_of_one_rank_are_those_of_the_formula(core):
    alone = {f"tests.engine.optimizers:{case} in data": 1 for case in CASES}
    assert not wrong(seen_by(core, alone), AGREES)
