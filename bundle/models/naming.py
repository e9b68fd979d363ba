"""The name of every parameter, the same in every layout and spec, and which part of it this rank holds.

Transformer Engine's specs build other modules than megatron's own: norms are folded into the projection
behind them, and the experts of a rank are one module. Names here are those of megatron's own specs, expert by
expert.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bundle.architectures import checkpoint_names, tensors
from bundle.errors import JobFailed
from bundle.mcore.gated_delta import read_delta_net
from bundle.mcore.groups import Groups

# The module of a chunk that its adapters are in: they are no tensors of the model (`models.adapters`).
CHUNK_ADAPTERS_MODULE = "adapters"
# Releases from 0.17 call the transformer layer inside an MTP layer differently.
_CANONICAL_MODULE_NAMES = {"mtp_model_layer": "transformer_layer"}


@dataclass(frozen=True)
class Shard:
    """This rank's part of a tensor: piece `rank` of `size` along `dim`.

    The dimension is laid out as blocks that are cut one by one (two equal ones for the fused gate and up
    projections of a gated MLP); `blocks` are their sizes, as shares of it.
    """

    dim: int
    rank: int
    size: int
    blocks: tuple[int, ...] = (1,)

    def extract(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of `tensor`, same dtype, not a copy where one block allows it."""
        parts = [block.chunk(self.size, self.dim)[self.rank] for block in self._split_blocks(tensor)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole tensor from all ranks' parts, in the order of the ranks."""
        blocks = zip(*map(self._split_blocks, parts), strict=True)
        return torch.cat([part for block in blocks for part in block], self.dim)

    def compute_block_sizes(self, length: int) -> list[int]:
        """Return the block sizes of a dimension of this length, of the whole tensor or of a part."""
        return [length * share // sum(self.blocks) for share in self.blocks]

    def _split_blocks(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        parts: Sequence[torch.Tensor] = tensor.split(
            self.compute_block_sizes(tensor.shape[self.dim]), self.dim
        )
        return parts


@dataclass(frozen=True)
class GloballyNamedTensor:
    """One tensor: its name in the whole model, what this rank has of it and, if it is cut, which part."""

    name: str
    parameter: torch.Tensor
    shard: Shard | None

    def extract_shard(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the whole tensor."""
        return tensor if self.shard is None else self.shard.extract(tensor)

    def make_generator(self, seed: int) -> torch.Generator:
        """Return the generator for a tensor of this name in a run of this seed, the same on every rank."""
        digest = hashlib.sha256(f"{seed}/{self.name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") % 2**63)

    def compute_full_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        shape = list(self.parameter.shape)
        if self.shard is not None:
            shape[self.shard.dim] *= self.shard.size
        return shape


def find_parameters(chunk: torch.nn.Module, groups: Groups) -> Iterator[GloballyNamedTensor]:
    """Yield all parameters of a bare GPTModel chunk; layers count over all stages, experts over all ranks."""
    for path, parameter in chunk.named_parameters():
        if not path.startswith(f"{CHUNK_ADAPTERS_MODULE}."):
            yield _name_tensor(chunk, path, parameter, groups)


def find_expert_biases(chunk: torch.nn.Module, groups: Groups) -> Iterator[GloballyNamedTensor]:
    """Yield the buffers that are saved with the parameters: the biases that steer the choice of experts."""
    for path, buffer in chunk.named_buffers():
        if tensors.is_buffer(path):
            yield _name_tensor(chunk, path, buffer, groups)


def _name_tensor(
    chunk: torch.nn.Module, path: str, tensor: torch.Tensor, groups: Groups
) -> GloballyNamedTensor:
    owner = chunk.get_submodule(path.rpartition(".")[0])
    name = _from_te_name(_find_global_name(chunk, path, groups), owner, groups)
    return GloballyNamedTensor(
        name, tensor, _find_shard(tensors.find_cut(name, read_delta_net(chunk)), groups)
    )


def _find_global_name(chunk: torch.nn.Module, path: str, groups: Groups) -> str:
    parts: list[str] = []
    module, parent_name = chunk, ""
    for part in path.split("."):
        child = getattr(module, part)
        if part.isdigit() and parent_name == "layers" and parts[:1] == ["decoder"]:
            part = str(child.layer_number - 1)
        elif part.isdigit() and parent_name == "local_experts":
            part = str(int(part) + groups.ep.rank * len(module))
        parts.append(_CANONICAL_MODULE_NAMES.get(part, part))
        module, parent_name = child, part
    name = ".".join(parts)
    return tensors.EMBEDDING if name == tensors.HEAD and chunk.share_embeddings_and_output_weights else name


def _from_te_name(name: str, owner: torch.nn.Module, groups: Groups) -> str:
    """Return the name in megatron's own specs for a parameter of a Transformer Engine module."""
    norm_name = checkpoint_names.to_unfused_name(name)
    if norm_name is None:
        raise JobFailed(
            f"{name}: Transformer Engine fused a norm into this projection, but mcore-bundle does not know"
            " the norm's name. Take the name from megatron's local specs, and add it in"
            " bundle/architectures/checkpoint_names.py"
        )
    return checkpoint_names.to_sequential_expert_name(
        norm_name, groups.ep.rank * getattr(owner, "num_gemms", 0)
    )


def _find_shard(cut: tensors.Cut | None, groups: Groups) -> Shard | None:
    """Return the shard by name: Transformer Engine marks whole tensors as parts, and no experts."""
    if cut is None:
        return None
    axis = groups.tp if cut.axis == "tp" else groups.etp
    return None if axis.size == 1 else Shard(cut.dim, axis.rank, axis.size, cut.blocks)
