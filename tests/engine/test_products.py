"""No product of a step repeats a matrix where a micro-batch has one row or pack."""

import json

import pytest

from tests.engine.products import MODELS
from tests.world import Core

pytestmark = pytest.mark.world


def test_a_micro_batch_of_one_row_or_pack_multiplies_no_matrix_row_by_row(core: Core):
    (printed,) = core.world.run("tests.engine.products", 1)
    shapes = json.loads(printed)
    assert len(shapes) == 2 * len(MODELS) and not any(shapes.values())
    refused = {case for case, repeated in shapes.items() if repeated is None}
    assert refused <= {f"{name}, pack" for name in MODELS if "MTP" in name}
    assert not refused or core.tree is not None
