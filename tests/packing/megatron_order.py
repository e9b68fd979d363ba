"""Compares our order of rows with that of megatron-core's rotary embedding; exits 0 when they agree."""

import torch
from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

from bundle.packing.packing import Packing
from bundle.recipe.alignment import Alignment


def positions_are_where_the_embedding_looks(cp, rank):
    packing = Packing.from_lengths([5, 33, 1, 16], Alignment(cp=cp, scaling="delayed"), rank=rank)
    table = torch.arange(256).view(-1, 1, 1, 1)
    expected = [
        _get_thd_freqs_on_this_cp_rank(rank, cp, torch.empty(rows // cp), table)
        for rows in packing.padding.padded_lengths_with_tail
    ]
    assert torch.equal(packing.local_positions[0], torch.cat(expected).flatten()), (cp, rank)


if __name__ == "__main__":
    for cp in (1, 2, 4, 8):
        for rank in range(cp):
            positions_are_where_the_embedding_looks(cp, rank)
