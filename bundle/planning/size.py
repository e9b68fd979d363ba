"""The size of a model: its parameters as one rank holds them, how many there are, active ones, floating-point
operations (FLOPs) of training, bytes of checkpoints and the disk for them.

Parameters are read from the table of the model's tensors (`bundle.architectures.tensors`), which tests hold
against what megatron-core creates, and against Transformer Engine's layers on an H200.

FLOPs of a forward pass are those of the model's matrix products, 2 for each multiply-add:

- a weight matrix once for each token; of routed experts the `topk` that a token goes through; the output
  layer once for each loss, the main one and MTP's; the embedding is a look-up;
- in every layer a query meets the keys up to its own position: n tokens make n (n + 1) / 2 pairs, each of as
  many multiply-adds as all heads of a key and of a value are wide; in a layer with a window of w each query
  meets the last w of these keys;
- a gated delta net has a state of keys times values for each head of values, and a token reads it for its
  key, adds to it and reads it for its query, whatever came before.

The backward pass takes twice as many; as many for weights that are frozen, which have no gradient. Norms,
rotations, softmax and all else that goes element by element is not counted, nor are adapters, padding (of the
vocabulary too) and what recomputation does again. This is what model FLOPs utilisation (MFU) is computed from
(Chowdhery et al., "PaLM", 2022, appendix B), but for causality, which that leaves out. A vision tower is
among the parameters, and not in these FLOPs: what it computes follows from images (`bundle.planning.tower`).
"""

import functools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from bundle import files
from bundle.architectures import Architecture, DeltaNet, adapters, padded_vocabulary, spellings
from bundle.architectures.tensors import (
    EMBEDDING,
    HEAD,
    TOWER,
    Cut,
    Tensor,
    Tensors,
    cut,
    is_buffer,
    is_expert,
)
from bundle.capabilities import LayerTraits
from bundle.capabilities.cpu import LOCAL
from bundle.planning.layout import Chunk, whole_model
from bundle.recipe import Parallel, Recipe
from bundle.recipe.recipe import Model
from bundle.recipe.sections import Optimizer

FP32, BF16 = 4, 2  # bytes of a value
# Weights of the layers that multiply in FP8: not the embedding, the output layer, routers and norms.
MULTIPLIED = re.compile(r"(linear_\w+|eh_proj)\.weight\d*$")


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


@functools.lru_cache(maxsize=64)  # a plan asks for those of a chunk three times and more
def parameters(
    architecture: Architecture, parallel: Parallel, chunk: Chunk, traits: LayerTraits
) -> tuple[Parameter, ...]:
    """The parameters of one rank's model chunk, in the order in which megatron-core registers them.

    Layers count over all stages; experts are those of a rank that holds the first ones.
    """
    table = Tensors(architecture, parallel.tp)
    local = _local_experts(architecture, parallel)
    tied = architecture.tied_embeddings
    found: list[Parameter] = []

    def held(tensor: Tensor, name: str = "") -> Parameter:
        how = cut(tensor.name, architecture.delta_net)
        shape = _local(tensor.shape, how, parallel)
        return Parameter(name or tensor.name, shape, how, is_expert(tensor.name))

    def layer(at: str, tensors: Iterator[Tensor]) -> None:
        own = [tensor for tensor in tensors if not is_buffer(tensor.name)]
        named = [(tensor.name, tensor) for tensor in own]
        if traits.fused_norms:
            named = list(spellings.with_folded_norms(at, own))
        if traits.grouped_experts:
            named = list(spellings.with_grouped_experts(named))
        found.extend(held(tensor, name) for name, tensor in named)

    # The first stage owns the embedding; a later one holds a copy for MTP, which a tied head is, or as such.
    travels = parallel.pp > 1 and (tied or architecture.mtp_layers > 0)
    if chunk.embedding or chunk.embedding_copy:
        found.append(held(table.embedding())._replace(shared_embedding=travels))
    for number in chunk.layers:
        layer(f"decoder.layers.{number}.", table.layer(number, local))
    if chunk.final_norm:
        found.append(held(table.final_norm()))
    for depth in range(chunk.mtp_layers):
        layer(f"mtp.layers.{depth}.transformer_layer.", table.mtp_layer(depth, local))
    if chunk.head and not (tied and (chunk.embedding or chunk.embedding_copy)):
        found.append(held(table.head())._replace(shared_embedding=travels and tied))
    if chunk.embedding:
        found.extend(map(held, table.tower()))
    return tuple(found)


def trained(
    architecture: Architecture, parallel: Parallel, chunk: Chunk, traits: LayerTraits, model: Model
) -> tuple[Parameter, ...]:
    """Those that have gradients and optimizer state: beside frozen weights the chunk's adapters, or all but
    what is frozen of a tower."""
    lora = model.lora
    if lora is None:
        every = parameters(architecture, parallel, chunk, traits)
        return tuple(of for of in every if not model.vision.freezes(of.name))
    table, local = Tensors(architecture, parallel.tp), _local_experts(architecture, parallel)
    layers = [table.layer(number, local) for number in chunk.layers]
    layers += [table.mtp_layer(depth, local) for depth in range(chunk.mtp_layers)]
    layers += [table.tower()] if chunk.embedding else []
    return tuple(
        Parameter(matrix.name, _local(matrix.shape, matrix.cut, parallel), matrix.cut, matrix.expert)
        for tensor in chain.from_iterable(layers)
        for pair in adapters.pairs(tensor, lora.targets, lora.rank)
        if pair is not None
        for matrix in pair
    )


def _local_experts(architecture: Architecture, parallel: Parallel) -> Sequence[int]:
    return range(architecture.moe.num_experts // parallel.ep) if architecture.moe else ()


def _local(shape: Sequence[int], how: Cut | None, parallel: Parallel) -> tuple[int, ...]:
    """One rank's part of a shape."""
    local = list(shape)
    if how is not None:
        local[how.dim] //= parallel.tp if how.axis == "tp" else parallel.etp
    return tuple(local)


# Which layers are fused changes no count.
_TRAITS = LOCAL


class ModelSize(NamedTuple):
    """Parameters of a model, rows of padding aside; FLOPs of a forward pass."""

    parameters: int  # without MTP layers
    active: int  # of these, what a token has to do with: not the experts that it is not sent to
    mtp: int  # of the MTP layers
    flops_per_token: int  # in weights
    flops_per_pair: int  # of a query and a key that it sees, over all layers without a window
    stored: int  # parameters of a checkpoint: all, with the rows of padding; adapters alone where these train
    adapters: int = 0  # parameters of them; 0: the weights themselves are trained
    frozen: int = 0  # parameters of a checkpoint without optimizer state: what is frozen of a tower
    window: int = 0
    flops_per_windowed_pair: int = 0  # over all layers with a window

    def training_flops(self, lengths: Iterable[int]) -> int:
        """FLOPs of training on sequences of these lengths, forward and backward."""
        each = list(lengths)
        pairs = sum(map(count_pairs, each))
        windowed = sum(count_pairs(length, self.window) for length in each)
        return self.step_flops(sum(each), pairs, windowed)

    def step_flops(self, tokens: int, pairs: int, windowed_pairs: int) -> int:
        """Return the same from sums over sequences: tokens, and `count_pairs` without and with the window."""
        of_weights = 2 if self.adapters else 3
        of_attention = pairs * self.flops_per_pair + windowed_pairs * self.flops_per_windowed_pair
        return of_weights * tokens * self.flops_per_token + 3 * of_attention

    def checkpoint_bytes(self, dtype: str, optimizer: Optimizer) -> int:
        """Bytes of a checkpoint: the weights in `dtype` (bf16, fp32), an fp32 copy, the optimizer's state.

        A copy of what is fp32 itself is there where the optimizer's state is divided between ranks.
        """
        bf16 = dtype == "bf16"
        in_fp32 = len(optimizer.states) + (bf16 or optimizer.use_distributed_optimizer)
        return self.stored * (BF16 if bf16 else FP32) + (self.stored - self.frozen) * in_fp32 * FP32

    def export_bytes(self, dtype: str, kind: str | None) -> int:
        """Bytes of an export (checkpoint.export) of a model in `dtype`; of one in FP8 the most."""
        written = self.adapters if kind == "peft" else self.parameters + self.mtp if kind else 0
        return written * (FP32 if dtype == "fp32" else BF16)


def count_pairs(length: Any, window: int = 0) -> Any:
    """Return how many pairs of a query and a key a sequence has, a key being among the last `window`.

    A window of 0 is none. `length` is a number, or a numpy array of them.
    """
    beyond = (length - window) * (length > window) if window else 0
    return length * (length + 1) // 2 - beyond * (beyond + 1) // 2


def model_size(architecture: Architecture, model: Model | None = None) -> ModelSize:
    """The size of a model, of which is trained what `model` says; None: all of it."""
    moe, hidden, vocabulary = architecture.moe, architecture.hidden_size, architecture.vocab_size
    experts, chosen = (moe.num_experts, moe.topk) if moe else (1, 1)
    # Each of `experts` ranks holds one of them, and the rest of the model.
    whole, parallel = whole_model(architecture), Parallel(ep=experts)
    tensors = parameters(architecture, parallel, whole, _TRAITS)
    own = [tensor for tensor in tensors if tensor.name not in (EMBEDDING, HEAD)]
    main = [tensor for tensor in own if not tensor.name.startswith("mtp.")]
    matrices = [t for t in own if len(t.shape) == 2 and not t.name.startswith(TOWER)]
    tables = (len(tensors) - len(own)) * hidden  # parameters for each entry of the vocabulary
    mtp, (key, value) = architecture.mtp_layers, architecture.head_dims
    pair = 2 * architecture.num_attention_heads * (key + value)
    adapted = model is not None and model.lora is not None
    learning = trained(architecture, parallel, whole, _TRAITS, model) if model else tensors
    added = _count(learning, experts) if adapted else 0
    return ModelSize(
        parameters=_count(main, experts) + tables * vocabulary,
        active=_count(main, chosen) + tables * vocabulary,
        mtp=_count(own, experts) - _count(main, experts),
        flops_per_token=2
        * (_count(matrices, chosen) + (1 + mtp) * vocabulary * hidden + _states(architecture.delta_net)),
        flops_per_pair=(architecture.attention_layers + mtp - sum(architecture.windows)) * pair,
        stored=added or _count(own, experts) + tables * padded_vocabulary(vocabulary, 1),
        adapters=added,
        frozen=0 if adapted else _count(tensors, experts) - _count(learning, experts),
        window=architecture.window or 0,
        flops_per_windowed_pair=sum(architecture.windows) * pair,
    )


def _states(net: DeltaNet | None) -> int:
    """The multiply-adds of a token in the states of all gated delta nets."""
    if net is None:
        return 0
    return 3 * sum(net.layers) * net.num_value_heads * net.key_head_dim * net.value_head_dim


def _count(tensors: Iterable[Parameter], experts: int) -> int:
    """The values of these tensors, each expert's in as many experts."""
    return sum(tensor.elements * (experts if tensor.expert else 1) for tensor in tensors)


class Disk(NamedTuple):
    """Bytes that a run leaves, and those that are free where it lives."""

    checkpoint: int
    checkpoints: int  # of those that stay and one more, which is being written
    exports: int  # at most, all together
    free: int
    there: int = 0  # of the checkpoints and exports, those that the run has written before

    @property
    def suffices(self) -> bool:
        """Whether they fit."""
        return self.checkpoints + self.exports - self.there <= self.free


def disk(recipe: Recipe, directory: Path, checkpoints: int = 0, exports: int = 0) -> Disk:
    """The disk of the run that would live in `directory`, which need not be there yet.

    So many checkpoints and exports of it are there already. Of epochs that are no steps yet, one export is
    counted.
    """
    size, kept = model_size(recipe.architecture, recipe.model), recipe.checkpoint
    one = size.checkpoint_bytes(recipe.model.dtype, recipe.optimizer)
    export = size.export_bytes(recipe.model.dtype, kept.export)
    most = kept.exports(recipe.train.steps or 1)
    there = min(checkpoints, kept.most) * one + min(exports, most) * export
    return Disk(one, one * kept.most, most * export, files.free(directory), there)
