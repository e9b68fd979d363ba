"""Direct preference optimisation: loss, rewards and gradients are those of its formula in float64."""

import pytest
import torch

from tests.engine.cells import AGREES_WITH_DOUBLES
from tests.engine.preferring import LAYOUTS
from tests.engine.test_layouts import seen_by, wrong

ALONE = ("rows", "packed")


@pytest.mark.world
@pytest.mark.slow
def test_every_layout_has_the_loss_and_gradients_of_the_formula(core):
    pytest.importorskip("transformers", minversion="5.0")
    sizes = {f"tests.engine.preferring:{name}": 1 if name in ALONE else 2 for name in LAYOUTS}
    seen = seen_by(core, sizes)
    assert len(seen) == len(LAYOUTS) and not wrong(seen, AGREES_WITH_DOUBLES)


def test_prediction_of_several_tokens_learns_the_better_answers_alone():
    """And as a mean over these: of two pairs each better answer counts twice among four sequences."""
    pytest.importorskip("megatron.core")
    from bundle.engine.microbatch import from_rows
    from bundle.training.preferences import with_reference

    ids, mask = torch.arange(24).view(4, 6), torch.ones(4, 6)
    mask[:, :2] = 0
    batch = from_rows(ids, ids + 1, mask, cp=1, rank=0, mtp_layers=1, mean="sequence")
    (weights,) = with_reference(batch, torch.zeros(4)).mtp_masks
    assert weights[1::2].eq(0).all()
    assert torch.equal(weights[::2], 2 * batch.mtp_masks[0][::2]) and weights.sum() > 0
