"""The low-rank adapters of model chunks: made beside frozen weights, named as PEFT does, merged into them.

A chunk that has some keeps them all in its module `adapters`: nothing else has a gradient, a state of the
optimizer or a place in a checkpoint.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bundle.architectures import adapters, tensors
from bundle.architectures.adapters import Matrix
from bundle.architectures.tensors import Rule, Tensors
from bundle.mcore import checkpoints
from bundle.mcore.adapters import Adapter, LowRank, attach, differentiate, mark, without_gradient
from bundle.mcore.groups import Groups, data_parallel_with_context, expert_data_parallel
from bundle.models import naming
from bundle.models.naming import Named, Shard
from bundle.recipe import Recipe
from bundle.recipe.model import LoRA


class Adapters(torch.nn.Module):
    """Every adapter of one chunk; `matrices` are their A and B under the names that they are published by."""

    def __init__(self, groups: Groups) -> None:
        super().__init__()
        self._groups = groups
        self.matrices: list[Named] = []
        self._of: dict[str, Adapter] = {}

    def add(self, weight: Named, adapter: Adapter, matrices: Sequence[Named]) -> None:
        """Keeps the adapter of one weight of megatron's, with its matrices."""
        self.add_module(str(len(self._of)), adapter)
        self._of[weight.name] = adapter
        self.matrices += matrices

    def merged(self, weight: Named) -> Named:
        """This rank's part of a weight with what its adapter adds; the weight itself where it has none."""
        adapter = self._of.get(weight.name)
        if adapter is None:
            return weight
        with torch.no_grad():
            values = (weight.parameter.float() + adapter.difference()).to(weight.parameter.dtype)
        return Named(weight.name, values, weight.shard)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Every matrix with its place in the whole, as megatron's checkpoints ask for it."""
        groups = self._groups
        names = {parameter: name for name, parameter in self.named_parameters()}
        found = {}
        for named in self.matrices:
            expert = tensors.is_expert(named.name)
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


def merged(weight: Named, chunks: Sequence[torch.nn.Module]) -> Named:
    """This rank's part of a weight of these chunks with what its adapter adds; that is a new tensor."""
    for made in filter(None, map(of, chunks)):
        weight = made.merged(weight)
    return weight


def kept(chunk: torch.nn.Module) -> torch.nn.Module:
    """What a checkpoint holds of a chunk: its adapters alone where it has some."""
    return of(chunk) or chunk


def noted(recipe: Recipe, *, loaded: bool) -> dict[str, Any] | None:
    """What a checkpoint says of its adapters, as JSON gives it back; None where it holds the weights."""
    lora = recipe.model.lora
    if lora is None:
        return None
    base = "the weights of model.path" if loaded else f"random weights of seed {recipe.seed}"
    return {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.targets), "beside": base}


def add(chunks: Sequence[torch.nn.Module], recipe: Recipe, groups: Groups, lora: LoRA) -> list[Named]:
    """Freezes the chunks and puts new adapters beside their linear layers; returns every A and B."""
    table = {tensor.name: tensor for tensor in Tensors(recipe.architecture, groups.tp.size)}
    sequence_parallel = recipe.parallel.sequence_parallel
    found: list[Named] = []
    for chunk in chunks:
        layers = {
            id(weight): layer for layer in chunk.modules() for weight in layer.parameters(recurse=False)
        }
        weights = list(naming.parameters(chunk, groups))
        chunk.requires_grad_(False)
        made = Adapters(groups)
        for weight in weights:
            if weight.name not in table:
                continue
            tensor = table[weight.name]
            if pairs := adapters.pairs(tensor, lora.targets, lora.rank):
                expert = tensors.is_expert(tensor.name)
                how = tensors.cut(tensor.name)
                group = (groups.etp if expert else groups.tp).group
                matrices = [_matrices(pair, weight, groups, sequence_parallel) for pair in pairs if pair]
                rest = iter(matrices)
                rule = part(tensor.rule, weight.shard)
                adapter = Adapter(
                    [pair and LowRank(*(named.parameter for named in next(rest))) for pair in pairs],
                    rule.widths,
                    rule.repeats,
                    scale=lora.alpha / lora.rank,
                    dim=how.dim if how else None,
                    group=group,
                    expert=expert,
                    sequence_parallel=sequence_parallel,
                )
                attach(adapter, layers[id(weight.parameter)])
                made.add(weight, adapter, [named for both in matrices for named in both])
        for weight in weights:
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
            digest = hashlib.sha256(f"{seed}/{named.name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") % 2**63)
            # torch's kaiming_uniform_(a=sqrt(5)), which PEFT fills A with
            whole = (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(columns)
            named.parameter.copy_(named.shard.of(whole) if named.shard else whole)


def _matrices(pair: adapters.Pair, weight: Named, groups: Groups, sequence_parallel: bool) -> list[Named]:
    """New A and B of this rank, of the weight's dtype and on its device, as megatron wants them marked."""
    return [_matrix(matrix, weight.parameter, groups, sequence_parallel) for matrix in pair]


def _matrix(matrix: Matrix, beside: Tensor, groups: Groups, sequence_parallel: bool) -> Named:
    axis = groups.etp if matrix.expert else groups.tp
    shard = None
    shape = list(matrix.shape)
    if matrix.cut is not None and axis.size > 1:
        shard = Shard(matrix.cut.dim, axis.rank, axis.size)
        shape[shard.dim] //= axis.size
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=beside.dtype, device=beside.device))
    mark(
        parameter,
        cut=shard is not None,
        group=axis.group,
        expert=matrix.expert,
        sequence_parallel=sequence_parallel,
        reduced=not matrix.expert or (groups.ep.size == 1 and groups.etp.size == groups.tp.size),
    )
    return Named(matrix.name, parameter, shard)


def every_matrix(chunks: Sequence[torch.nn.Module]) -> Iterator[Named]:
    """A and B of all adapters of these chunks."""
    for chunk in chunks:
        made = of(chunk)
        yield from made.matrices if made else ()
