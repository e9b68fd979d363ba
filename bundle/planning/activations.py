"""Bytes of activations that a rank holds, over its chunks and the micro-batches in flight.

Counted tensor by tensor as Korthikanti et al. do ("Reducing Activation Recomputation in Large Transformer
Models", 2022, section 4), for the layers that are really built.
"""

from bundle.capabilities import LayerTraits
from bundle.frozen import frozen
from bundle.planning.code import Code
from bundle.planning.layers import LayerBytes
from bundle.planning.parameters import padded_vocabulary
from bundle.planning.placement import Chunk, Placement
from bundle.recipe import Recipe

ID = 8  # bytes of a token id
FP32 = 4


@frozen
class Activations:
    """Bytes of one rank of a stage.

    `microbatch`: what one leaves in all chunks together. `held`: all that waits for its backward pass, at
    most `in_flight` micro-batches of each chunk. `passing`: what comes on top for a moment, the logits of the
    loss or one unit of full recomputation, whichever is more.
    """

    microbatch: int
    held: int
    passing: int
    in_flight: tuple[int, ...]

    @property
    def total(self) -> int:
        """The most that is there at once."""
        return self.held + self.passing


def activations(
    recipe: Recipe, placement: Placement, stage: int, layers: LayerTraits, code: Code
) -> Activations:
    """The activations of a rank of a pipeline stage."""
    each = LayerBytes(recipe, layers, code)
    chunks = placement.stages[stage]
    flying = in_flight(len(placement.stages), stage, len(chunks), placement.microbatches)
    sizes = [_chunk(each, chunk) for chunk in chunks]
    return Activations(
        microbatch=sum(sizes),
        held=sum(size * count for size, count in zip(sizes, flying, strict=True)),
        passing=max(max(_recomputed(each, chunk), _logits(each, chunk)) for chunk in chunks),
        in_flight=flying,
    )


def in_flight(stages: int, stage: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """For each chunk of a stage how many micro-batches wait at most: those run before the first backward, and
    one.

    Source: pipeline_parallel/schedules.py, get_pp_rank_microbatches and the 1F1B schedules.
    """
    if chunks == 1:
        return (min(stages - stage, microbatches),)
    forwards = min((stages - stage - 1) * 2 + (chunks - 1) * stages + 1, microbatches * chunks)
    order = [index % (stages * chunks) // stages for index in range(forwards)]
    return tuple(order.count(chunk) for chunk in range(chunks))


def _chunk(each: LayerBytes, chunk: Chunk) -> int:
    """What one micro-batch leaves in a chunk."""
    total = each.tokens * ID if chunk.embedding else 0
    total += _decoder(each, chunk)
    if chunk.head:
        total += _head(each)
    return total + chunk.mtp_layers * _mtp(each)


def _decoder(each: LayerBytes, chunk: Chunk) -> int:
    """The decoder layers, of which full recomputation keeps the inputs only."""
    recompute = each.recipe.model.recompute
    pattern = each.recipe.architecture.layer_pattern
    whole = [each.layer(bool(pattern[number])) for number in chunk.layers]
    if recompute is None or recompute.granularity != "full":
        return sum(whole)
    unit = recompute.layers or 1
    if recompute.method == "block":
        return min(unit, len(whole)) * each.stream_input + sum(whole[unit:])
    return -(-len(whole) // unit) * each.stream_input


def _recomputed(each: LayerBytes, chunk: Chunk) -> int:
    """What full recomputation brings back at a time: the layers of one unit."""
    recompute = each.recipe.model.recompute
    if recompute is None or recompute.granularity != "full":
        return 0
    unit = (recompute.layers or 1) if recompute.method == "uniform" else 1
    pattern = each.recipe.architecture.layer_pattern
    whole = [each.layer(bool(pattern[number])) for number in chunk.layers]
    return max(sum(whole[first : first + unit]) for first in range(0, len(whole), unit))


def _mtp(each: LayerBytes) -> int:
    """One depth of multi-token prediction: its embedding, the join with the trunk, a layer, its own loss."""
    architecture, recompute = each.recipe.architecture, each.recipe.model.recompute
    hidden = architecture.hidden_size
    if recompute is not None and recompute.granularity == "full":
        return each.tokens * ID + 2 * each.stream_input + _head(each)
    joined = 2 * each.stream * each.kept.norm(hidden) + 2 * each.stream_input
    return each.tokens * ID + joined + each.layer(bool(architecture.layer_pattern[-1])) + _head(each)


def _head(each: LayerBytes) -> int:
    """The last norm, the output layer's input, and the softmax over the vocabulary, in fp32."""
    hidden, rows = each.recipe.architecture.hidden_size, _vocabulary(each)
    return each.stream * each.kept.norm(hidden) + each.stream_input + each.tokens * (rows * FP32 + ID)


def _logits(each: LayerBytes, chunk: Chunk) -> int:
    """The logits of every loss beside their softmax, and the fp32 copy of a fused loss."""
    if not chunk.head:
        return 0
    copies = 0 if each.kept.size == FP32 else (1 + chunk.mtp_layers) * each.kept.size
    return each.tokens * _vocabulary(each) * (copies + (FP32 if each.layers.fused_loss else 0))


def _vocabulary(each: LayerBytes) -> int:
    tp = each.recipe.parallel.tp
    return padded_vocabulary(each.recipe.architecture.vocab_size, tp) // tp
