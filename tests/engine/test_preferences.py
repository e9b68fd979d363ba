"""Direct preference optimisation: loss, rewards and gradients are those of its formula in float64."""

import pytest

from tests.engine.cells import AGREES_WITH_DOUBLES
from tests.engine.preferring import LAYOUTS
from tests.engine.test_layouts import seen_by, wrong

ALONE = ("rows", "packed")


@pytest.mark.world
def test_every_layout_has_the_loss_and_gradients_of_the_formula(core):
    pytest.importorskip("transformers", minversion="5.0")
    sizes = {f"tests.engine.preferring:{name}": 1 if name in ALONE else 2 for name in LAYOUTS}
    seen = seen_by(core, sizes)
    assert len(seen) == len(LAYOUTS) and not wrong(seen, AGREES_WITH_DOUBLES)
