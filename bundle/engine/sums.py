"""Sums over whole sequences, of which context-parallel ranks hold parts."""

import torch
import torch.distributed as dist
from torch import Tensor

from bundle.mcore.groups import ParallelGroup
from bundle.packing.packing import Packing


class MicroBatchSequenceSums:
    """Adds the tokens of each sequence of one micro-batch up, on every context-parallel rank alike."""

    def __init__(self, packing: Packing, cp: ParallelGroup) -> None:
        self._count, self._cp = len(packing.padding.lengths), cp
        # The sequence of every row [b, s / cp]. Padding counts to the first one, where it adds its zeros.
        self.owner = packing.repeat_per_packed_row(torch.arange(self._count, device=packing.device))

    def sum_token_values(self, values: Tensor) -> Tensor:
        """Return the sums [..., sequences] of values [..., b, s / cp], 0 in padding; without a gradient.

        Several values at once cost one exchange.
        """
        rows = values.detach().flatten(-2)
        sums = rows.new_zeros(*rows.shape[:-1], self._count).index_add(-1, self.owner.flatten(), rows)
        if self._cp.size > 1:
            dist.all_reduce(sums, group=self._cp.group)
        return sums

    def spread(self, values: Tensor) -> Tensor:
        """Return for each token [b, s / cp] the value [sequences] of its sequence."""
        return values[self.owner]
