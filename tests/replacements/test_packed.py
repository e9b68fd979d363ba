"""Packed rotary positions by one gather, against megatron's own loop over the sequences."""

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.usefixtures("megatron")

LENGTHS = (8, 4, 20, 12)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("rows", [max(LENGTHS), sum(LENGTHS), 64], ids=["longest", "whole pack", "longer"])
def test_every_form_of_the_table_is_read_as_megatron_reads_it(ranks, rows):
    from megatron.core.models.common.embeddings import rope_utils

    from bundle.replacements.attention import rotate_packed_by_gather

    boundaries = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32)
    t, table = torch.randn(sum(LENGTHS) // ranks, 3, 8), torch.randn(rows, 1, 1, 8)
    for rank in range(ranks):
        group = SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)
        for how in ({}, {"rotary_interleaved": True}, {"mscale": 1.3}):
            original = rope_utils._apply_rotary_pos_emb_thd
            want = original(t, boundaries, table, cp_group=group, **how)
            seen = rotate_packed_by_gather(original)(t, boundaries, table, cp_group=group, **how)
            assert torch.equal(seen, want)
