"""VLM batches in bshd under FP8: ids and mask are padded by one rule, labels by another, and do not fit.

verl (1dda039b9) pads ids and mask in build_vlm_attn_mask_bshd without FP8, labels in preprocess_bshd_engine
with it: [2, 38] against [2, 128].
"""

import torch

from bundle.sequences.alignment import Alignment
from bundle.sequences.packing import Packing


def test_ids_labels_and_mask_have_one_shape():
    lengths = [38, 21]
    by_each_builder = [
        Alignment("bshd", scaling=scaling).pad(lengths).longest for scaling in (None, "blockwise")
    ]
    assert by_each_builder == [38, 40]  # two rules: what upstream does, with our least padding

    packing = Packing.of(lengths, Alignment("bshd", scaling="blockwise"))
    ids = torch.arange(sum(lengths))
    shapes = {packing.pack(ids).shape, packing.pack(ids, roll=1).shape, packing.valid.shape}
    assert shapes == {(2, 40)}
