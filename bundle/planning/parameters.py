"""Every parameter of a model chunk as one rank holds it: name, shape, how it is cut, in registration order.

Read from the table of the model's tensors (`bundle.architectures.tensors`), which tests hold against what
megatron-core creates, and against Transformer Engine's layers on an H200. Layers count over all stages;
experts are those of a rank that holds the first ones.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from bundle.architectures import Architecture, transformer_engine
from bundle.architectures.tensors import Cut, Tensor, Tensors, cut, is_buffer, is_expert
from bundle.capabilities import LayerTraits
from bundle.planning.layout import Chunk
from bundle.recipe import Parallel


class Parameter(NamedTuple):
    """One tensor of one rank. `shape` is local; `cut` says of what part."""

    name: str
    shape: tuple[int, ...]
    cut: Cut | None = None
    expert: bool = False
    shared_embedding: bool = False  # of the first and the last stage, hence in a bucket of its own

    @property
    def elements(self) -> int:
        """The number of values that this rank holds."""
        return math.prod(self.shape)


def parameters(
    architecture: Architecture, parallel: Parallel, chunk: Chunk, traits: LayerTraits
) -> tuple[Parameter, ...]:
    """The parameters of one rank's model chunk, in the order in which megatron-core registers them."""
    return tuple(_parameters(architecture, parallel, chunk, traits))


def _parameters(
    architecture: Architecture, parallel: Parallel, chunk: Chunk, traits: LayerTraits
) -> Iterator[Parameter]:
    table = Tensors(architecture, parallel.tp)
    local = range(architecture.moe.num_experts // parallel.ep) if architecture.moe else ()
    tied = architecture.tied_embeddings

    def held(tensor: Tensor, name: str = "") -> Parameter:
        shape, how = list(tensor.shape), cut(tensor.name)
        if how is not None:
            shape[how.dim] //= parallel.tp if how.axis == "tp" else parallel.etp
        return Parameter(name or tensor.name, tuple(shape), how, is_expert(tensor.name))

    def layer(at: str, tensors: Iterator[Tensor]) -> Iterator[Parameter]:
        own = [tensor for tensor in tensors if not is_buffer(tensor.name)]
        named = [(tensor.name, tensor) for tensor in own]
        if traits.fused_norms:
            named = list(transformer_engine.with_folded_norms(at, own))
        if traits.grouped_experts:
            named = list(transformer_engine.with_grouped_experts(named))
        return (held(tensor, name) for name, tensor in named)

    # The first stage owns the embedding; a later one holds a copy for MTP, or as a tied head.
    travels = parallel.pp > 1 and (tied or architecture.mtp_layers > 0)
    if chunk.embedding or chunk.embedding_copy:
        yield held(table.embedding())._replace(shared_embedding=travels)
    for number in chunk.layers:
        yield from layer(f"decoder.layers.{number}.", table.layer(number, local))
    if chunk.head:
        yield held(table.final_norm())
    for depth in range(chunk.mtp_layers):
        at = f"mtp.layers.{depth}.transformer_layer."
        yield from layer(at, table.mtp_layer(depth, local))
    if chunk.head and not (chunk.embedding and tied):
        alone = tied and not chunk.embedding_copy
        yield held(table.head())._replace(shared_embedding=travels and alone)
