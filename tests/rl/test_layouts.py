"""A policy's loss, measures and gradients are those of its reference, in every layout and cut."""

import pytest

from tests.engine.cells import AGREES_WITH_DOUBLES
from tests.engine.test_layouts import seen_by, wrong

pytestmark = pytest.mark.world
PLACE = "tests.rl.layouts"


def test_every_layout_and_cut_has_the_loss_and_gradients_of_the_reference(core):
    pytest.importorskip("transformers", minversion="5.0")
    from tests.rl.layouts import GROUPS, LAYOUTS

    assert {name for _, names in GROUPS.values() for name in names} == set(LAYOUTS)
    sizes = {f"{PLACE}:{name}": ranks for name, (ranks, _) in GROUPS.items()}
    assert not wrong(seen_by(core, sizes), AGREES_WITH_DOUBLES)


def test_prediction_of_several_tokens_leaves_the_gradient_of_the_policy_alone(core):
    pytest.importorskip("transformers", minversion="5.0")
    assert not wrong(seen_by(core, {f"{PLACE}:prediction": 1}), 1e-7)
