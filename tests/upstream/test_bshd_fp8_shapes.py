"""VLM batches in bshd under FP8: ids and mask are padded by one rule, labels by another, and do not fit.

verl (1dda039b9) pads ids and mask in build_vlm_attn_mask_bshd without FP8, labels in preprocess_bshd_engine
with it: [2, 38] against [2, 128].
"""

import pytest
import torch

from bundle.capabilities.ascend import ASCEND
from bundle.capabilities.cuda import CUDA
from bundle.packing.packing import Packing, build_model_and_output_masks
from bundle.recipe.alignment import Alignment

LENGTHS = [38, 21]


def test_two_rules_give_two_shapes():
    """What upstream does, with our least padding."""
    by_each_builder = [
        Alignment("bshd", scaling=scaling).pad(LENGTHS).longest_kernel_sequence_rows
        for scaling in (None, "blockwise")
    ]
    assert by_each_builder == [38, 40]
    ids, labels = (torch.zeros(2, rows) for rows in by_each_builder)
    with pytest.raises(RuntimeError, match="must match"):
        ids + labels


@pytest.mark.parametrize("backend", [CUDA, ASCEND], ids=lambda backend: backend.backend)
def test_ids_labels_and_masks_have_one_shape(backend):
    packing = Packing.from_lengths(LENGTHS, Alignment("bshd", scaling="blockwise"))
    ids = torch.arange(sum(LENGTHS))
    of = build_model_and_output_masks(packing, backend.find_mask("vlm", "bshd"))
    built = [
        packing.unsharded_bshd_packing.pack_concatenated_tokens(ids),
        packing.pack_concatenated_tokens(ids, roll=1),
        packing.valid,
        of.valid,
    ]
    built += [of.model] if of.model is not None else []
    assert {tuple(x.shape) for x in built} == {(2, 40)}
