"""The low-rank adapters of model chunks: made beside frozen weights, named as PEFT does, merged into them.

A chunk that has some keeps them all in its module `adapters`: nothing else has a gradient, a state of the
optimizer or a place in a checkpoint.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bundle.architectures import adapters, tensors
from bundle.architectures.adapters import LoraMatrix
from bundle.architectures.tensors import TOWER_PREFIX, ConversionRule, Tensors, find_cut, is_expert
from bundle.mcore import checkpoints
from bundle.mcore.adapters import (
    LowRankDelta,
    LowRankPair,
    attach,
    require_output_grad,
    set_parallel_attributes,
    set_zero_main_grad,
)
from bundle.mcore.groups import Groups, get_dp_cp_group, get_expert_dp_group
from bundle.models import naming
from bundle.models.naming import GloballyNamedTensor, Shard
from bundle.recipe import Recipe
from bundle.recipe.recipe import LoRA


class Adapters(torch.nn.Module):
    """Every adapter of one chunk; `matrices` are all that is trained, under the published names."""

    def __init__(self, lora: LoRA, groups: Groups, *, sequence_parallel: bool) -> None:
        super().__init__()
        self._lora, self._groups, self._sequence_parallel = lora, groups, sequence_parallel
        self.matrices: list[GloballyNamedTensor] = []
        self._by_weight: dict[str, tuple[LowRankDelta, int]] = {}

    def add(
        self, layer: torch.nn.Module, weights: Sequence[tuple[GloballyNamedTensor, tensors.Tensor]]
    ) -> None:
        """Add a new adapter beside the layer that has these weights, where one of them is a target."""
        lora = self._lora
        pairs = [
            adapters.build_adapter_pairs(tensor, lora.targets, lora.rank, use_dora=lora.use_dora)
            for _, tensor in weights
        ]
        if not any(pairs):
            return
        weight, tensor = weights[0]
        rule, weight_cut, expert = (
            shard_rule(tensor.rule, weight.shard),
            find_cut(tensor.name),
            is_expert(tensor.name),
        )
        # Every rank of tp computes all of a tower, whose gradients are whole.
        is_sequence_parallel = self._sequence_parallel and not tensor.name.startswith(TOWER_PREFIX)
        adapter = LowRankDelta(
            [
                [
                    pair and self._build_pair(pair, weight.parameter, is_sequence_parallel)
                    for pair in weight_pairs or (None,) * len(rule.widths)
                ]
                for (weight, _), weight_pairs in zip(weights, pairs, strict=True)
            ],
            [weight.parameter for weight, _ in weights],
            rule.widths,
            rule.repeats,
            scale=lora.scale,
            dropout=lora.dropout,
            dim=weight_cut.dim if weight_cut else None,
            group=(self._groups.etp if expert else self._groups.tp).group,
            is_expert=expert,
            sequence_parallel=is_sequence_parallel,
        )
        attach(adapter, layer)
        self.add_module(str(len(self._modules)), adapter)
        self._by_weight |= {
            weight.name: (adapter, number) for number, (weight, _) in enumerate(weights) if pairs[number]
        }

    def _build_pair(self, pair: adapters.Pair, template: Tensor, sequence_parallel: bool) -> LowRankPair:
        """Return the new pair of this rank, of a weight's dtype and on its device, with megatron's marks."""
        matrices = [
            _build_matrix(matrix, template, self._groups, sequence_parallel)
            for matrix in pair.list_trained_matrices()
        ]
        self.matrices += matrices
        return LowRankPair(*(matrix.parameter for matrix in matrices))

    def merge_adapter(self, weight: GloballyNamedTensor) -> GloballyNamedTensor:
        """Return a weight's part on this rank with its adapter merged; the weight itself if it has none."""
        if weight.name not in self._by_weight:
            return weight
        adapter, number = self._by_weight[weight.name]
        with torch.no_grad():
            values = adapter.merge_into(weight.parameter, number).to(weight.parameter.dtype)
        return GloballyNamedTensor(weight.name, values, weight.shard)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return every matrix with its position in the whole tensor, as megatron's checkpoints need it."""
        groups = self._groups
        names = {parameter: name for name, parameter in self.named_parameters()}
        sharded = {}
        for named in self.matrices:
            expert = is_expert(named.name)
            axis, replicas = (groups.etp, get_expert_dp_group()) if expert else (groups.tp, get_dp_cp_group())
            shard = named.shard
            copy_rank = 0 if shard else axis.rank
            cut = None if shard is None else (shard.dim, shard.rank, shard.size)
            key = f"{prefix}{names[named.parameter]}"
            sharded[key] = checkpoints.build_sharded_tensor(
                named.name, named.parameter, cut, (0, copy_rank, replicas.rank())
            )
        return sharded


def find_adapters(chunk: torch.nn.Module) -> Adapters | None:
    """Return the adapters of a bare GPTModel chunk; None where the weights themselves are trained."""
    chunk_adapters: Adapters | None = getattr(chunk, naming.CHUNK_ADAPTERS_MODULE, None)
    return chunk_adapters


@contextmanager
def disable_adapters(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Let the chunks compute as if they had no adapters inside the context."""
    attached = [module for chunk in chunks for module in chunk.modules() if isinstance(module, LowRankDelta)]
    for adapter in attached:
        adapter.is_disabled = True
    try:
        yield
    finally:
        for adapter in attached:
            adapter.is_disabled = False


def merge_adapters(weight: GloballyNamedTensor, chunks: Sequence[torch.nn.Module]) -> GloballyNamedTensor:
    """Return this rank's part of a weight of these chunks with its adapter merged, not in place.

    With DoRA all ranks that the weight is cut between call it.
    """
    for chunk_adapters in filter(None, map(find_adapters, chunks)):
        weight = chunk_adapters.merge_adapter(weight)
    return weight


def select_adapters_or_chunk(chunk: torch.nn.Module) -> torch.nn.Module:
    """Return the module of a chunk that a checkpoint holds: its adapters alone where it has some."""
    return find_adapters(chunk) or chunk


def freeze_and_add_adapters(
    chunks: Sequence[torch.nn.Module], recipe: Recipe, groups: Groups, lora: LoRA
) -> list[GloballyNamedTensor]:
    """Freeze the chunks and add new adapters beside their linear layers; return all that is trained."""
    table = {tensor.name: tensor for tensor in Tensors(recipe.architecture, groups.tp.size)}
    matrices: list[GloballyNamedTensor] = []
    for chunk in chunks:
        weights = {id(weight.parameter): weight for weight in naming.find_parameters(chunk, groups)}
        chunk.requires_grad_(False)
        chunk_adapters = Adapters(lora, groups, sequence_parallel=recipe.parallel.sequence_parallel)
        for layer in list(chunk.modules()):
            layer_weights = [
                weights[id(parameter)]
                for name, parameter in layer.named_parameters(recurse=False)
                if name.startswith("weight")  # one, or one for each expert
            ]
            chunk_adapters.add(
                layer, [(weight, table[weight.name]) for weight in layer_weights if weight.name in table]
            )
        for weight in weights.values():
            if weight.name == tensors.EMBEDDING:
                set_zero_main_grad(weight.parameter)
        if hasattr(chunk, "embedding"):
            require_output_grad(chunk.embedding)
        chunk.add_module(naming.CHUNK_ADAPTERS_MODULE, chunk_adapters)
        matrices += chunk_adapters.matrices
    return matrices


def shard_rule(rule: ConversionRule, shard: Shard | None) -> ConversionRule:
    """Return the rule by which a rank's parts of published weights make its part of ours."""
    if shard is None or shard.dim != rule.dim:
        return rule
    if rule.repeats > 1:
        return rule._replace(repeats=rule.repeats // shard.size)
    return rule._replace(widths=tuple(width // shard.size for width in rule.widths))


def initialize_adapters(chunks: Sequence[torch.nn.Module], seed: int) -> None:
    """Fill new adapters as PEFT does; the magnitudes follow from the chunks' weights. All ranks call it."""
    initialize_matrices(list(list_matrices(chunks)), seed)
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, LowRankDelta):
                module.initialize_magnitudes()


def initialize_matrices(matrices: Sequence[GloballyNamedTensor], seed: int) -> None:
    """Fill new A and B as PEFT does: B zero, A uniform. Values depend on (seed, name), not on the layout."""
    with torch.no_grad():
        for named in matrices:
            if named.parameter.ndim == 1:
                continue  # a magnitude
            if named.name.endswith(".lora_B.weight"):
                named.parameter.zero_()
                continue
            _, columns = shape = named.compute_full_shape()
            # torch's kaiming_uniform_(a=sqrt(5)), which PEFT fills A with
            values = (torch.rand(shape, generator=named.make_generator(seed)) * 2 - 1) / math.sqrt(columns)
            named.parameter.copy_(named.extract_shard(values))


def allocate_shard(matrix: LoraMatrix, rank: int, size: int, template: Tensor) -> GloballyNamedTensor:
    """Return an empty tensor for the part of a matrix that `rank` of `size` holds.

    It has the dtype and the device of `template`.
    """
    shard, shape = None, list(matrix.shape)
    if matrix.cut is not None and size > 1:
        shard = Shard(matrix.cut.dim, rank, size)
        shape[shard.dim] //= size
    return GloballyNamedTensor(
        matrix.name, torch.empty(shape, dtype=template.dtype, device=template.device), shard
    )


def _build_matrix(
    matrix: LoraMatrix, template: Tensor, groups: Groups, sequence_parallel: bool
) -> GloballyNamedTensor:
    axis = groups.etp if matrix.is_expert else groups.tp
    local = allocate_shard(matrix, axis.rank, axis.size, template)
    parameter = torch.nn.Parameter(local.parameter)
    set_parallel_attributes(
        parameter,
        is_cut=local.shard is not None,
        group=axis.group,
        is_expert=matrix.is_expert,
        sequence_parallel=sequence_parallel,
        allreduce=not matrix.is_expert or (groups.ep.size == 1 and groups.etp.size == groups.tp.size),
    )
    return GloballyNamedTensor(matrix.name, parameter, local.shard)


def list_matrices(chunks: Sequence[torch.nn.Module]) -> Iterator[GloballyNamedTensor]:
    """Yield A, B and magnitude of all adapters of these chunks."""
    for chunk in chunks:
        chunk_adapters = find_adapters(chunk)
        yield from chunk_adapters.matrices if chunk_adapters else ()
