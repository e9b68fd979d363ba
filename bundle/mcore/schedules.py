"""Megatron's pipeline schedules: one call runs the micro-batches of a step through every stage."""

from collections.abc import Callable, Iterator, Sequence
from itertools import tee
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from bundle.mcore import context

ForwardStep = Callable[[Iterator[Any], torch.nn.Module], tuple[torch.Tensor, Callable[..., Any]]]


def run(
    step: ForwardStep,
    micro_batches: Sequence[Any],
    chunks: Sequence[torch.nn.Module],
    *,
    sequence_length: int,
    micro_batch_size: int,
    forward_only: bool = False,
) -> list[dict[str, Any]]:
    """What the loss function returned for each micro-batch, on the last stage; elsewhere an empty list.

    `sequence_length` [tokens of the whole row, before it is cut for context parallel] and `micro_batch_size`
    [rows] give the shape of what stages exchange. Each model chunk reads the same micro-batches.
    """
    several = len(chunks) > 1
    iterators = tee(micro_batches, len(chunks))
    with context.run.set(object()):
        results: list[dict[str, Any]] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=list(iterators) if several else iterators[0],
            model=list(chunks) if several else chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=sequence_length,
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
        )
    return results
