"""What packing must not do: read from the device, or take more operations for more sequences."""

from functools import partial

import torch

from benchmarks.sequences import operations
from bundle.packing.packing import Packing
from bundle.recipe.alignment import Alignment

ALIGNMENT = Alignment(tp=2, cp=2, sequence_parallel=True, scaling="blockwise")


def everything(count, device):
    """All that a micro-batch of `count` sequences asks of its packing."""
    lengths = [7 + i % 5 for i in range(count)]
    packing = Packing.from_lengths(lengths, ALIGNMENT, rank=1, device=device)
    ids = torch.ones(sum(lengths), dtype=torch.int64, device=device)
    routes = torch.ones(sum(lengths), 4, 2, dtype=torch.int16, device=device)
    packing.repeat_per_packed_row(torch.ones(count, device=device))
    shard = packing.pack_concatenated_tokens(routes, fill=3)
    return (
        *(packing.pack_concatenated_tokens(ids, roll=roll) for roll in (0, 1, 2)),
        *(packing.local_positions, packing.valid, packing.cu_seqlens, packing.cu_seqlens_padded),
        *packing.split_concatenated(packing.unpack_gathered_shards(torch.cat((shard, shard)))),
    )


def test_the_number_of_operations_does_not_depend_on_the_number_of_sequences():
    counts = [operations(partial(everything, sequences, "cpu")) for sequences in (2, 33, 512)]
    assert counts[0] == counts[1] == counts[2] < 50


def test_nothing_is_read_back_from_the_device():
    # Tensors of the meta device have no values: any look at one raises.
    assert {x.device.type for x in everything(33, "meta")} == {"meta"}
