"""The size of a model: parameters, FLOPs of training, bytes of checkpoints and of the disk for them.

Parameters are counted as one rank holds them, in total, and active ones. They are read from the table of the
model's tensors (`bundle.architectures.tensors`). Tests compare it with what megatron-core creates, and with
Transformer Engine's layers on an H200.

FLOPs (floating-point operations) of a forward pass are those of the model's matrix products, 2 for each
multiply-add:

- a weight matrix counts once for each token; routed experts count as the `topk` that a token goes through;
- the output layer counts once for each loss, the main one and MTP's; the embedding is a look-up;
- in every layer a query meets the keys up to its own position: n tokens make n (n + 1) / 2 pairs. A pair
  has as many multiply-adds as all heads of a key and of a value are wide. In a layer with a window of w each
  query meets the last w of these keys;
- a gated delta net has a state of keys times values for each head of values. A token reads it for its key,
  adds to it and reads it for its query, whatever came before.

The backward pass takes twice as many, and as many for frozen weights, which have no gradient. Norms,
rotations, softmax and other operations by element are not counted. Adapters, padding (of the vocabulary too)
and recomputation are not counted either. Model FLOPs utilisation (MFU) is computed from this number
(Chowdhery et al., "PaLM", 2022, appendix B, which leaves causality out). A vision tower is among the
parameters, and not in these FLOPs: what it computes follows from images (`bundle.planning.tower`).
"""

import functools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from bundle import files
from bundle.architectures import Architecture, DeltaNet, adapters, checkpoint_names, pad_vocab_to_lcm
from bundle.architectures.tensors import (
    EMBEDDING,
    HEAD,
    TOWER_PREFIX,
    Cut,
    Tensor,
    Tensors,
    find_cut,
    is_buffer,
    is_expert,
)
from bundle.capabilities import LayerTraits
from bundle.capabilities.cpu import LOCAL_LAYER_TRAITS
from bundle.planning.layout import ModelChunk, build_single_chunk
from bundle.recipe import Parallel, Recipe
from bundle.recipe.recipe import Model
from bundle.recipe.sections import Optimizer

FP32, BF16, FP8 = 4, 2, 1  # bytes of a value
DTYPE_BYTES = {"fp32": FP32, "bf16": BF16}
# Weights of the layers that multiply in FP8: not the embedding, the output layer, routers and norms.
FP8_GEMM_WEIGHT_PATTERN = re.compile(r"(linear_\w+|eh_proj)\.weight\d*$")


class LocalParameter(NamedTuple):
    """One tensor of one rank; `shape` is local, and `cut` says which part of the whole it is."""

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
def list_parameters(
    architecture: Architecture, parallel: Parallel, chunk: ModelChunk, traits: LayerTraits
) -> tuple[LocalParameter, ...]:
    """Return the parameters of one rank's model chunk, in the order in which megatron-core registers them.

    Layers count over all stages; experts are those of a rank that holds the first ones.
    """
    table = Tensors(architecture, parallel.tp)
    tied = architecture.tied_embeddings
    chunk_parameters: list[LocalParameter] = []
    sizes = Parallel(tp=parallel.tp, ep=parallel.ep, etp=parallel.etp)

    def build_parameter(tensor: Tensor, name: str = "") -> LocalParameter:
        return _build_parameter(architecture, sizes, tensor, name)

    # The first stage owns the embedding; a later one holds a copy for MTP, which a tied head is, or as such.
    is_shared = parallel.pp > 1 and (tied or architecture.mtp_layers > 0)
    if chunk.embedding or chunk.has_mtp_embedding_copy:
        chunk_parameters.append(build_parameter(table.build_embedding())._replace(shared_embedding=is_shared))
    for number in chunk.layers:
        first = _find_first_alike(architecture, number)
        prefix = f"decoder.layers.{number}."
        chunk_parameters.extend(
            LocalParameter(prefix + suffix, shape, tensor_cut, has_expert)
            for suffix, shape, tensor_cut, has_expert, _ in _list_layer_parameters(
                architecture, sizes, traits, first
            )
        )
    if chunk.final_norm:
        chunk_parameters.append(build_parameter(table.build_final_norm()))
    for depth in range(chunk.mtp_layers):
        prefix = f"mtp.layers.{depth}.transformer_layer."
        tensors = table.build_mtp_layer(depth, _list_local_expert_indices(architecture, parallel))
        named = _rename_layer(prefix, tensors, traits)
        chunk_parameters.extend(build_parameter(tensor, name) for name, tensor in named)
    if chunk.head and not (tied and (chunk.embedding or chunk.has_mtp_embedding_copy)):
        chunk_parameters.append(
            build_parameter(table.build_head())._replace(shared_embedding=is_shared and tied)
        )
    if chunk.embedding:
        chunk_parameters.extend(map(build_parameter, table.build_tower()))
    return tuple(chunk_parameters)


def _build_parameter(
    architecture: Architecture, sizes: Parallel, tensor: Tensor, name: str
) -> LocalParameter:
    tensor_cut = find_cut(tensor.name, architecture.delta_net)
    shape = _compute_local_shape(tensor.shape, tensor_cut, sizes)
    return LocalParameter(name or tensor.name, shape, tensor_cut, is_expert(tensor.name))


def _rename_layer(prefix: str, tensors: Iterator[Tensor], traits: LayerTraits) -> list[tuple[str, Tensor]]:
    """Return the weights of a layer with the names that the backend's layers give them."""
    weights = [tensor for tensor in tensors if not is_buffer(tensor.name)]
    named = [(tensor.name, tensor) for tensor in weights]
    if traits.fused_norms:
        named = list(checkpoint_names.rename_norms_to_fused(prefix, weights))
    if traits.grouped_experts:
        named = list(checkpoint_names.rename_experts_to_grouped_linear(named))
    return named


def _find_first_alike(architecture: Architecture, number: int) -> int:
    """Return the first decoder layer with the same tensors as this one, but for the number in their names."""
    nets = architecture.delta_net.layers if architecture.delta_net else architecture.moe_layer_pattern
    kinds = list(zip(architecture.moe_layer_pattern, nets, strict=True))
    return kinds.index(kinds[number])


@functools.lru_cache(maxsize=256)  # a search plans many layouts that differ in pp and cp alone
def _list_layer_parameters(
    architecture: Architecture, sizes: Parallel, traits: LayerTraits, number: int
) -> tuple[LocalParameter, ...]:
    """Return the parameters of a decoder layer, named without the layer's prefix."""
    prefix, table = f"decoder.layers.{number}.", Tensors(architecture, sizes.tp)
    tensors = table.build_layer(number, _list_local_expert_indices(architecture, sizes))
    return tuple(
        _build_parameter(architecture, sizes, tensor, name.removeprefix(prefix))
        for name, tensor in _rename_layer(prefix, tensors, traits)
    )


def list_trained_parameters(
    architecture: Architecture, parallel: Parallel, chunk: ModelChunk, traits: LayerTraits, model: Model
) -> tuple[LocalParameter, ...]:
    """Return the parameters of a chunk that have gradients and optimizer state.

    With LoRA these are the chunk's adapters; else all parameters except the frozen parts of a tower.
    """
    lora = model.lora
    if lora is None:
        chunk_parameters = list_parameters(architecture, parallel, chunk, traits)
        if not (model.vision.freeze_tower or model.vision.freeze_projector):
            return chunk_parameters
        return tuple(
            parameter for parameter in chunk_parameters if not model.vision.is_tensor_frozen(parameter.name)
        )
    table, local = Tensors(architecture, parallel.tp), _list_local_expert_indices(architecture, parallel)
    layers = [table.build_layer(number, local) for number in chunk.layers]
    layers += [table.build_mtp_layer(depth, local) for depth in range(chunk.mtp_layers)]
    layers += [table.build_tower()] if chunk.embedding else []
    return tuple(
        LocalParameter(
            matrix.name,
            _compute_local_shape(matrix.shape, matrix.cut, parallel),
            matrix.cut,
            matrix.is_expert,
        )
        for tensor in chain.from_iterable(layers)
        for pair in adapters.build_adapter_pairs(tensor, lora.targets, lora.rank, use_dora=lora.use_dora)
        if pair is not None
        for matrix in pair.list_trained_matrices()
    )


def _list_local_expert_indices(architecture: Architecture, parallel: Parallel) -> Sequence[int]:
    return range(architecture.moe.num_experts // parallel.ep) if architecture.moe else ()


def _compute_local_shape(shape: Sequence[int], tensor_cut: Cut | None, parallel: Parallel) -> tuple[int, ...]:
    """Return one rank's part of a shape."""
    local = list(shape)
    if tensor_cut is not None:
        local[tensor_cut.dim] //= parallel.tp if tensor_cut.axis == "tp" else parallel.etp
    return tuple(local)


# Which layers are fused changes no count.
_COUNTING_TRAITS = LOCAL_LAYER_TRAITS


class ParametersAndForwardFlops(NamedTuple):
    """Parameters of a model without rows of padding, and FLOPs of a forward pass."""

    parameters: int  # without MTP layers
    active_parameters: int  # of these, what a token has to do with: not the experts that it is not sent to
    mtp_parameters: int  # of the MTP layers
    flops_per_token: int  # in weights
    flops_per_pair: int  # of a query and a key that it sees, over all layers without a window
    stored_parameters: (
        int  # parameters of a checkpoint: all, with the rows of padding; adapters alone where these train
    )
    adapter_parameters: int = 0  # parameters of them; 0: the weights themselves are trained
    frozen_parameters: int = (
        0  # parameters of a checkpoint without optimizer state: what is frozen of a tower
    )
    window: int = 0
    flops_per_windowed_pair: int = 0  # over all layers with a window

    def count_training_flops(self, lengths: Iterable[int]) -> int:
        """Return the FLOPs of training on sequences of these lengths, forward and backward."""
        length_list = list(lengths)
        pairs = sum(map(count_attention_pairs, length_list))
        windowed = sum(count_attention_pairs(length, self.window) for length in length_list)
        return self.count_step_flops(sum(length_list), pairs, windowed)

    def count_step_flops(self, tokens: int, pairs: int, windowed_pairs: int) -> int:
        """Return the FLOPs of training from sums over sequences.

        The sums are the tokens, and `count_attention_pairs` without and with the window.
        """
        weight_factor = 2 if self.adapter_parameters else 3
        attention_flops = pairs * self.flops_per_pair + windowed_pairs * self.flops_per_windowed_pair
        return weight_factor * tokens * self.flops_per_token + 3 * attention_flops

    def count_checkpoint_bytes(self, dtype: str, optimizer: Optimizer) -> int:
        """Return the bytes of a checkpoint: weights in `dtype` (bf16, fp32), an fp32 copy, optimizer state.

        Weights that are fp32 themselves have a copy where the optimizer's state is divided between ranks.
        """
        is_bf16 = dtype == "bf16"
        in_fp32 = len(optimizer.state_names) + (is_bf16 or optimizer.use_distributed_optimizer)
        return (
            self.stored_parameters * (BF16 if is_bf16 else FP32)
            + (self.stored_parameters - self.frozen_parameters) * in_fp32 * FP32
        )

    def count_export_bytes(self, dtype: str, kind: str | None) -> int:
        """Return the bytes of an export (checkpoint.export) of a model in `dtype`; in FP8 the upper limit."""
        parameters = (
            self.adapter_parameters
            if kind == "peft"
            else self.parameters + self.mtp_parameters
            if kind
            else 0
        )
        return parameters * (FP32 if dtype == "fp32" else BF16)


def count_attention_pairs(length: Any, window: int = 0) -> Any:
    """Return the number of pairs of a query and a key in a sequence; a key is among the last `window`.

    A `window` of 0 means none. `length` is a number, or a numpy array of them.
    """
    beyond = (length - window) * (length > window) if window else 0
    return length * (length + 1) // 2 - beyond * (beyond + 1) // 2


def compute_model_size(architecture: Architecture, model: Model | None = None) -> ParametersAndForwardFlops:
    """Return the size of a model; `model` says what is trained, None: all of it."""
    moe, hidden, vocabulary = architecture.moe, architecture.hidden_size, architecture.vocab_size
    experts, chosen = (moe.num_experts, moe.topk) if moe else (1, 1)
    # Each of `experts` ranks holds one of them, and the rest of the model.
    chunk, parallel = build_single_chunk(architecture), Parallel(ep=experts)
    tensors = list_parameters(architecture, parallel, chunk, _COUNTING_TRAITS)
    layer_tensors = [tensor for tensor in tensors if tensor.name not in (EMBEDDING, HEAD)]
    main = [tensor for tensor in layer_tensors if not tensor.name.startswith("mtp.")]
    matrices = [t for t in layer_tensors if len(t.shape) == 2 and not t.name.startswith(TOWER_PREFIX)]
    tables = (len(tensors) - len(layer_tensors)) * hidden  # parameters for each entry of the vocabulary
    mtp, (key, value) = architecture.mtp_layers, architecture.head_dims
    pair = 2 * architecture.num_attention_heads * (key + value)
    has_adapters = model is not None and model.lora is not None
    trained_parameters = (
        list_trained_parameters(architecture, parallel, chunk, _COUNTING_TRAITS, model) if model else tensors
    )
    adapter_parameters = _count_values_repeating_experts(trained_parameters, experts) if has_adapters else 0
    return ParametersAndForwardFlops(
        parameters=_count_values_repeating_experts(main, experts) + tables * vocabulary,
        active_parameters=_count_values_repeating_experts(main, chosen) + tables * vocabulary,
        mtp_parameters=_count_values_repeating_experts(layer_tensors, experts)
        - _count_values_repeating_experts(main, experts),
        flops_per_token=2
        * (
            _count_values_repeating_experts(matrices, chosen)
            + (1 + mtp) * vocabulary * hidden
            + _count_state_products(architecture.delta_net)
        ),
        flops_per_pair=(architecture.num_attention_layers + mtp - sum(architecture.windows)) * pair,
        stored_parameters=adapter_parameters
        or _count_values_repeating_experts(layer_tensors, experts) + tables * pad_vocab_to_lcm(vocabulary, 1),
        adapter_parameters=adapter_parameters,
        frozen_parameters=0
        if has_adapters
        else _count_values_repeating_experts(tensors, experts)
        - _count_values_repeating_experts(trained_parameters, experts),
        window=architecture.window or 0,
        flops_per_windowed_pair=sum(architecture.windows) * pair,
    )


def _count_state_products(net: DeltaNet | None) -> int:
    """Return the multiply-adds of a token in the states of all gated delta nets."""
    if net is None:
        return 0
    return 3 * sum(net.layers) * net.num_value_heads * net.key_head_dim * net.value_head_dim


def _count_values_repeating_experts(tensors: Iterable[LocalParameter], experts: int) -> int:
    """Return the number of values of these tensors; an expert's tensor counts `experts` times."""
    return sum(tensor.elements * (experts if tensor.expert else 1) for tensor in tensors)


class LayerFlops(NamedTuple):
    """FLOPs of a forward pass through one layer; experts are those that a token is sent to."""

    per_token: int  # in weights that are not experts'
    per_expert_token: int
    per_pair: int  # of a query and a key that it sees; 0 with a gated delta net
    window: int


@functools.lru_cache(maxsize=8)
def list_layer_flops(architecture: Architecture) -> tuple[LayerFlops, ...]:
    """Return the FLOPs of every decoder layer and then of every MTP layer, without the output layer."""
    a, table = architecture, Tensors(architecture)
    net_layers = a.delta_net.layers if a.delta_net else (0,) * a.num_layers
    windows = a.windows or (0,) * a.num_layers
    state_flops = 2 * _count_state_products(a.delta_net) // max(1, sum(net_layers))
    pair_flops = 2 * a.num_attention_heads * sum(a.head_dims)

    def count(tensors: Iterable[Tensor], *, has_net: int, window: int) -> LayerFlops:
        matrices = [tensor for tensor in tensors if len(tensor.shape) == 2 and not is_buffer(tensor.name)]
        dense, experts = (
            2 * sum(math.prod(tensor.shape) for tensor in matrices if is_expert(tensor.name) == chosen)
            for chosen in (False, True)
        )
        return LayerFlops(
            dense + state_flops * has_net,
            experts * (a.moe.topk if a.moe else 0),
            0 if has_net else pair_flops,
            (a.window or 0) * window,
        )

    decoder = (
        count(table.build_layer(number, range(1)), has_net=net_layers[number], window=windows[number])
        for number in range(a.num_layers)
    )
    mtp = (
        count(table.build_mtp_layer(depth, range(1)), has_net=0, window=0) for depth in range(a.mtp_layers)
    )
    return (*decoder, *mtp)


class DiskUsage(NamedTuple):
    """The bytes that a run leaves, and the bytes that are free where it lives."""

    checkpoint: int
    checkpoints: int  # of those that stay and one more, which is being written
    exports: int  # at most, all together
    free: int
    written: int = 0  # of the checkpoints and exports, those that the run has written before

    @property
    def is_sufficient(self) -> bool:
        """True if the checkpoints and exports fit."""
        return self.checkpoints + self.exports - self.written <= self.free


def estimate_checkpoint_export_disk(
    recipe: Recipe, directory: Path, checkpoints: int = 0, exports: int = 0
) -> DiskUsage:
    """Return the disk usage of the run that would live in `directory`, which need not exist yet.

    `checkpoints` and `exports` are the numbers of those that it has already. Where epochs are not yet known
    as steps, one export is counted.
    """
    size, checkpoint = compute_model_size(recipe.architecture, recipe.model), recipe.checkpoint
    checkpoint_bytes = size.count_checkpoint_bytes(recipe.model.dtype, recipe.optimizer)
    export = size.count_export_bytes(recipe.model.dtype, checkpoint.export)
    max_exports = checkpoint.count_exports(recipe.train.steps or 1)
    written = (
        min(checkpoints, checkpoint.peak_disk_count) * checkpoint_bytes + min(exports, max_exports) * export
    )
    return DiskUsage(
        checkpoint_bytes,
        checkpoint_bytes * checkpoint.peak_disk_count,
        max_exports * export,
        files.find_free_bytes(directory),
        written,
    )
