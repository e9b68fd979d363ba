"""The contiguous buffers that megatron-core's data-parallel wrapper lays parameters and gradients out in.

Source: _ParamAndGradBuffer.__init__ (0.12 to 0.17), DistributedOptimizer._compute_per_buffer_param_layout
(from 0.18). Parameters go in from the last to the first, each at a multiple of 64 elements; a bucket ends at
a multiple of lcm(ranks, 128), so that every rank's part is equal and aligned.
"""

import math
from collections.abc import Iterator, Sequence

from bundle.frozen import frozen
from bundle.planning.parameters import Parameter

PARAMETER_MULTIPLE = 64
BUCKET_MULTIPLE = 128


@frozen
class Span:
    """The elements [start, end) of a buffer that hold one parameter."""

    parameter: Parameter
    start: int
    end: int


@frozen
class Buffer:
    """One buffer of one model chunk, whose every bucket is divided equally between `ranks` data-parallel
    ranks.
    """

    ranks: int
    spans: tuple[Span, ...]
    buckets: tuple[tuple[int, int], ...]  # [start, end) of each

    @property
    def elements(self) -> int:
        """The size of the buffer, padding included."""
        return self.buckets[-1][1] if self.buckets else 0

    def changes(self) -> Iterator[tuple[int, int, int]]:
        """What a rank keeps optimizer state for beyond the rank before it: (rank, elements, tensors).

        Nothing is counted rank by rank: between the ends of a tensor all keep alike, however many they are.
        """
        bucket = 0
        for span in self.spans:
            while span.start >= self.buckets[bucket][1]:
                bucket += 1
            first, last = self.buckets[bucket]
            share = (last - first) // self.ranks
            begin, end = (span.start - first) // share, (span.end - first - 1) // share
            for rank, until in {(begin, begin + 1), (begin + 1, end), (end, end + 1)}:
                if rank < until:
                    elements = min(span.end, first + (rank + 1) * share) - max(
                        span.start, first + rank * share
                    )
                    yield rank, elements, 1
                    yield until, -elements, -1


def lay_out(parameters: Sequence[Parameter], ranks: int, bucket_size: int | None = None) -> Buffer:
    """The buffer of these parameters (in registration order); `bucket_size` None puts all into one bucket.

    A bucket closes once it holds `bucket_size` elements. An embedding that two stages share has a bucket of
    its own.
    """
    multiple = math.lcm(ranks, BUCKET_MULTIPLE)
    spans: list[Span] = []
    buckets: list[tuple[int, int]] = []
    start = opened = 0

    def close(end: int) -> int:
        buckets.append((opened, _up(end, multiple)))
        return buckets[-1][1]

    for parameter in reversed(parameters):
        start = _up(start, PARAMETER_MULTIPLE)
        if parameter.shared_embedding and start > opened:
            start = opened = close(start)
        end = start + parameter.elements
        spans.append(Span(parameter, start, end))
        full = bucket_size is not None and end - opened >= bucket_size
        start = end
        if full or parameter.shared_embedding:
            start = opened = close(end)
    if start > opened:
        close(start)
    return Buffer(ranks, tuple(spans), tuple(buckets))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def breaks_before_0_13(parameters: Sequence[Parameter], ranks: int) -> bool:
    """Whether megatron-core 0.12 lays the shared embedding across a boundary of buckets.

    There the bucket in front is closed at a multiple of lcm(ranks, 128), but the embedding still starts where
    the parameters ended, if that is a multiple of `ranks` (param_and_grad_buffer.py; mended in 0.13.0).
    """
    start = 0
    for parameter in reversed(parameters):
        start = _up(start, PARAMETER_MULTIPLE)
        if parameter.shared_embedding:
            return start % ranks == 0 and start % math.lcm(ranks, BUCKET_MULTIPLE) != 0
        start += parameter.elements
    return False
