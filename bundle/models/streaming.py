"""Brings the tensors of model chunks, in any layout, to the ranks that ask for them, one after the other.

The parts of a tensor go to one rank, which joins them; where all ranks ask, that rank sends them the result.
No rank holds more than one full tensor at once. All ranks iterate to the end, or the others wait for ever.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from bundle.architectures import tensors
from bundle.architectures.tensors import Tensors
from bundle.errors import JobFailed
from bundle.mcore.groups import Groups
from bundle.models import adapters, naming
from bundle.models.naming import GloballyNamedTensor, Shard
from bundle.models.publishing import TORCH_DTYPE_BY_SAFETENSORS_NAME, build_stored_values, list_stored_tensors
from bundle.pretrained.writing import WeightFormat

# The ranks that get a tensor: the one with this number, the one that holds its first part, or all.
Receiver = int | Literal["owner", "all"]


@dataclass(frozen=True, slots=True)
class TensorRoute:
    """Where one tensor of the table is: the ranks of its parts in order, of replicas the lowest.

    `owner` holds the first part of what becomes one published tensor. `shard` is how the first part was cut.
    """

    tensor: tensors.Tensor
    holders: tuple[int, ...]
    owner: int
    dtype: torch.dtype
    shard: Shard | None

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of one part."""
        shape = list(self.tensor.shape)
        if self.shard is not None:
            shape[self.shard.dim] //= self.shard.size
        return tuple(shape)


class TensorStream:
    """Tensors of a table that the ranks hold parts of; `routes` are alike on all ranks.

    A stream may be iterated again after the values have changed: it reads the parameters themselves.
    """

    def __init__(
        self,
        table: Sequence[tensors.Tensor],
        local_tensors: Mapping[str, GloballyNamedTensor],
        adapt: Callable[[GloballyNamedTensor], GloballyNamedTensor] = lambda named: named,
    ) -> None:
        """`local_tensors` are this rank's parts by name; `adapt` is applied to a part before it is sent.

        All ranks call it. Raise JobFailed on all of them for tensors that no rank holds.
        """
        self.routes = _plan_routes(table, local_tensors)
        self._local_tensors, self._adapt = local_tensors, adapt
        self._device = next((named.parameter.device for named in local_tensors.values()), torch.device("cpu"))

    @classmethod
    def from_chunks(cls, chunks: Sequence[torch.nn.Module], groups: Groups, table: Tensors) -> "TensorStream":
        """Return the stream of all that is published of these chunks, with their adapters merged."""
        local_tensors: dict[str, GloballyNamedTensor] = {}
        for chunk in chunks:
            for named in (*naming.find_parameters(chunk, groups), *naming.find_expert_biases(chunk, groups)):
                local_tensors.setdefault(named.name, named)
        return cls(
            list(table.iterate_in_publishing_order()),
            local_tensors,
            lambda named: adapters.merge_adapters(named, chunks),
        )

    @property
    def distinct_owner_ranks(self) -> list[int]:
        """The ranks that own a tensor, in order."""
        return sorted({route.owner for route in self.routes})

    def gather(self, receiver: Receiver) -> Iterator[tuple[tensors.Tensor, Tensor]]:
        """Yield each tensor of the table with its values, on the ranks that receive it.

        Values may be those of a parameter itself: copy what is to stay.
        """
        for route in self.routes:
            target = receiver if isinstance(receiver, int) else route.owner
            full_tensor = self._collect(route, target)
            if receiver == "all" and dist.get_world_size() > 1:
                full_tensor = self._broadcast(route, full_tensor)
            if full_tensor is not None:
                yield route.tensor, full_tensor

    def publish(self, numbers: WeightFormat, receiver: Receiver) -> Iterator[tuple[str, Tensor]]:
        """Yield every published tensor with its name, as files of `numbers` hold it, where it is received.

        Values may be those of a parameter itself: copy what is to stay.
        """
        name, stack = "", torch.empty(0)
        for tensor, full_tensor in self.gather(receiver):
            entries = itertools.zip_longest(
                list_stored_tensors(tensor, numbers), build_stored_values(tensor, full_tensor, numbers)
            )
            for entry, part in entries:
                if tensor.stack is None:
                    yield entry.name, part.to(TORCH_DTYPE_BY_SAFETENSORS_NAME[entry.dtype])
                    continue
                if entry is not None:
                    name, dtype = entry.name, TORCH_DTYPE_BY_SAFETENSORS_NAME[entry.dtype]
                    stack = torch.empty(entry.shape, dtype=dtype, device=part.device)
                stack[tensor.stack.entry] = part
                if tensor.stack.entry == tensor.stack.entries - 1:
                    yield name, stack

    def _collect(self, route: TensorRoute, target: int) -> Tensor | None:
        """Return the full tensor on the rank `target`; None on the others, which have sent it their part."""
        rank = dist.get_rank()
        part = None
        if rank in route.holders:
            part = self._adapt(self._local_tensors[route.tensor.name]).parameter.detach().contiguous()
        if rank != target:
            if part is not None:
                dist.send(part, target)
            return None
        parts = []
        for holder in route.holders:
            if holder != rank:
                received = torch.empty(route.part_shape, dtype=route.dtype, device=self._device)
                dist.recv(received, holder)
                parts.append(received)
            elif part is not None:
                parts.append(part)
        return parts[0] if route.shard is None else route.shard.join(parts)

    def _broadcast(self, route: TensorRoute, full_tensor: Tensor | None) -> Tensor:
        """Return the full tensor, which its owner has, on all ranks."""
        if full_tensor is None:
            full_tensor = torch.empty(route.tensor.shape, dtype=route.dtype, device=self._device)
        full_tensor = full_tensor.contiguous()
        dist.broadcast(full_tensor, route.owner)
        return full_tensor


# What a rank says of its part of a tensor: its number in the table and in the tensor, dtype and cut.
_LocalPart = tuple[int, int, torch.dtype, Shard | None]


def _plan_routes(
    table: Sequence[tensors.Tensor], local_tensors: Mapping[str, GloballyNamedTensor]
) -> list[TensorRoute]:
    local_parts: list[_LocalPart] = []
    for number, tensor in enumerate(table):
        if (named := local_tensors.get(tensor.name)) is not None:
            part = named.shard.rank if named.shard else 0
            local_parts.append((number, part, named.parameter.dtype, named.shard if part == 0 else None))
    parts_by_rank: list[list[_LocalPart]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts_by_rank, local_parts)
    holders: dict[int, dict[int, int]] = {}
    first_parts: dict[int, tuple[torch.dtype, Shard | None]] = {}
    for rank, rank_parts in enumerate(parts_by_rank):
        for number, part, dtype, shard in rank_parts:
            holders.setdefault(number, {}).setdefault(part, rank)
            if part == 0:
                first_parts.setdefault(number, (dtype, shard))
    if missing := [tensor.name for number, tensor in enumerate(table) if number not in first_parts]:
        raise JobFailed(
            f"{missing[0]}: no rank has this tensor ({len(missing)} of {len(table)} tensors are missing)."
            " Report it with the recipe."
        )
    routes = []
    owners: dict[tuple[str, ...], int] = {}
    for number, tensor in enumerate(table):
        ranks = tuple(holders[number][part] for part in sorted(holders[number]))
        owner = owners.setdefault(tensor.published_names, ranks[0])
        routes.append(TensorRoute(tensor, ranks, owner, *first_parts[number]))
    return routes
