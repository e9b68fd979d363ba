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
from bundle.architectures.adapters import Matrix
from bundle.architectures.tensors import TOWER, Rule, Tensors, cut, is_expert
from bundle.mcore import checkpoints
from bundle.mcore.adapters import Adapter, LowRank, attach, differentiate, mark, without_gradient
from bundle.mcore.groups import Groups, data_parallel_with_context, expert_data_parallel
from bundle.models import naming
from bundle.models.naming import Named, Shard
from bundle.recipe import Recipe
from bundle.recipe.recipe import LoRA


class Adapters(torch.nn.Module):
    """Every adapter of one chunk; `matrices` are their A and B under the names that they are published by."""

    def __init__(self, lora: LoRA, groups: Groups, *, sequence_parallel: bool) -> None:
        super().__init__()
        self._lora, self._groups, self._sequence_parallel = lora, groups, sequence_parallel
        self.matrices: list[Named] = []
        self._of: dict[str, tuple[Adapter, int]] = {}

    def add(self, layer: torch.nn.Module, weights: Sequence[tuple[Named, tensors.Tensor]]) -> None:
        """Puts a new adapter beside the layer that these are the weights of, where one is a target."""
        lora = self._lora
        pairs = [adapters.pairs(tensor, lora.targets, lora.rank) for _, tensor in weights]
        if not any(pairs):
            return
        weight, tensor = weights[0]
        rule, how, expert = part(tensor.rule, weight.shard), cut(tensor.name), is_expert(tensor.name)
        # Every rank of tp computes all of a tower, whose gradients are whole.
        parted = self._sequence_parallel and not tensor.name.startswith(TOWER)
        adapter = Adapter(
            [
                [
                    pair and self._pair(pair, weight.parameter, parted)
                    for pair in of_weight or (None,) * len(rule.widths)
                ]
                for (weight, _), of_weight in zip(weights, pairs, strict=True)
            ],
            rule.widths,
            rule.repeats,
            scale=lora.alpha / lora.rank,
            dropout=lora.dropout,
            dim=how.dim if how else None,
            group=(self._groups.etp if expert else self._groups.tp).group,
            expert=expert,
            sequence_parallel=parted,
        )
        attach(adapter, layer)
        self.add_module(str(len(self._modules)), adapter)
        self._of |= {
            weight.name: (adapter, number) for number, (weight, _) in enumerate(weights) if pairs[number]
        }

    def _pair(self, pair: adapters.Pair, beside: Tensor, sequence_parallel: bool) -> LowRank:
        """New A and B of this rank, of a weight's dtype and on its device, as megatron wants them marked."""
        a, b = (_matrix(each, beside, self._groups, sequence_parallel) for each in pair)
        self.matrices += [a, b]
        return LowRank(a.parameter, b.parameter)

    def merged(self, weight: Named) -> Named:
        """This rank's part of a weight with what its adapter adds; the weight itself where it has none."""
        if weight.name not in self._of:
            return weight
        adapter, number = self._of[weight.name]
        with torch.no_grad():
            values = (weight.parameter.float() + adapter.difference(number)).to(weight.parameter.dtype)
        return Named(weight.name, values, weight.shard)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Every matrix with its place in the whole, as megatron's checkpoints ask for it."""
        groups = self._groups
        names = {parameter: name for name, parameter in self.named_parameters()}
        found = {}
        for named in self.matrices:
            expert = is_expert(named.name)
            axis, replicas = (
                (groups.etp, expert_data_parallel()) if expert else (groups.tp, data_parallel_with_context())
            )
            shard = named.shard
            of_whole = 0 if shard else axis.rank
            cut = None if shard is None else (shard.dim, shard.rank, shard.size)
            key = f"{prefix}{names[named.parameter]}"
            found[key] = checkpoints.placed(named.name, named.parameter, cut, (0, of_whole, replicas.rank()))
        return found


def of(chunk: torch.nn.Module) -> Adapters | None:
    """The adapters of a bare GPTModel chunk; None where its weights themselves are trained."""
    found: Adapters | None = getattr(chunk, naming.ADAPTERS, None)
    return found


@contextmanager
def left_out(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """The chunks compute inside as if they had no adapters."""
    found = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapter)]
    for adapter in found:
        adapter.left_out = True
    try:
        yield
    finally:
        for adapter in found:
            adapter.left_out = False


def merged(weight: Named, chunks: Sequence[torch.nn.Module]) -> Named:
    """This rank's part of a weight of these chunks with what its adapter adds; that is a new tensor."""
    for made in filter(None, map(of, chunks)):
        weight = made.merged(weight)
    return weight


def kept(chunk: torch.nn.Module) -> torch.nn.Module:
    """What a checkpoint holds of a chunk: its adapters alone where it has some."""
    return of(chunk) or chunk


def add(chunks: Sequence[torch.nn.Module], recipe: Recipe, groups: Groups, lora: LoRA) -> list[Named]:
    """Freezes the chunks and puts new adapters beside their linear layers; returns every A and B."""
    table = {tensor.name: tensor for tensor in Tensors(recipe.architecture, groups.tp.size)}
    found: list[Named] = []
    for chunk in chunks:
        weights = {id(weight.parameter): weight for weight in naming.parameters(chunk, groups)}
        chunk.requires_grad_(False)
        made = Adapters(lora, groups, sequence_parallel=recipe.parallel.sequence_parallel)
        for layer in list(chunk.modules()):
            own = [
                weights[id(parameter)]
                for name, parameter in layer.named_parameters(recurse=False)
                if name.startswith("weight")  # one, or one for each expert
            ]
            made.add(layer, [(weight, table[weight.name]) for weight in own if weight.name in table])
        for weight in weights.values():
            if weight.name == tensors.EMBEDDING:
                without_gradient(weight.parameter)
        if hasattr(chunk, "embedding"):
            differentiate(chunk.embedding)
        chunk.add_module(naming.ADAPTERS, made)
        found += made.matrices
    return found


def part(rule: Rule, shard: Shard | None) -> Rule:
    """How a rank's part of published weights makes its part of ours."""
    if shard is None or shard.dim != rule.dim:
        return rule
    if rule.repeats > 1:
        return rule._replace(repeats=rule.repeats // shard.size)
    return rule._replace(widths=tuple(width // shard.size for width in rule.widths))


def draw(matrices: Sequence[Named], seed: int) -> None:
    """Fills new adapters as PEFT begins them: B zero, A uniform; from (seed, name), alike in every layout."""
    with torch.no_grad():
        for named in matrices:
            if named.name.endswith(".lora_B.weight"):
                named.parameter.zero_()
                continue
            _, columns = shape = named.whole_shape()
            # torch's kaiming_uniform_(a=sqrt(5)), which PEFT fills A with
            whole = (torch.rand(shape, generator=named.generator(seed)) * 2 - 1) / math.sqrt(columns)
            named.parameter.copy_(named.part(whole))


def empty(matrix: Matrix, rank: int, size: int, beside: Tensor) -> Named:
    """Room for the part of a matrix that `rank` of `size` has, of the dtype and on the device of `beside`."""
    shard, shape = None, list(matrix.shape)
    if matrix.cut is not None and size > 1:
        shard = Shard(matrix.cut.dim, rank, size)
        shape[shard.dim] //= size
    return Named(matrix.name, torch.empty(shape, dtype=beside.dtype, device=beside.device), shard)


def _matrix(matrix: Matrix, beside: Tensor, groups: Groups, sequence_parallel: bool) -> Named:
    axis = groups.etp if matrix.expert else groups.tp
    own = empty(matrix, axis.rank, axis.size, beside)
    parameter = torch.nn.Parameter(own.parameter)
    mark(
        parameter,
        cut=own.shard is not None,
        group=axis.group,
        expert=matrix.expert,
        sequence_parallel=sequence_parallel,
        reduced=not matrix.expert or (groups.ep.size == 1 and groups.etp.size == groups.tp.size),
    )
    return Named(matrix.name, parameter, own.shard)


def every_matrix(chunks: Sequence[torch.nn.Module]) -> Iterator[Named]:
    """A and B of all adapters of these chunks."""
    for chunk in chunks:
        made = of(chunk)
        yield from made.matrices if made else ()
