"""The layout-independent name of every parameter, and which part of the whole tensor this rank holds."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bundle.mcore.groups import Axis, Groups

# Releases from 0.17 call the transformer layer inside an MTP layer differently.
_RENAMED = {"mtp_model_layer": "transformer_layer"}


@dataclass(frozen=True)
class Shard:
    """This rank's part of a tensor: piece `rank` of `size` along `dim`.

    The dimension is laid out as `blocks` equal blocks that are cut one by one (2 for the fused gate and up
    projections of a gated MLP).
    """

    dim: int
    rank: int
    size: int
    blocks: int = 1

    def whole_shape(self, local: torch.Size) -> list[int]:
        """The shape of the whole tensor whose local part has shape `local`."""
        shape = list(local)
        shape[self.dim] *= self.size
        return shape

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of `whole`, same dtype, not a copy where one block allows it."""
        parts = [block.chunk(self.size, self.dim)[self.rank] for block in whole.chunk(self.blocks, self.dim)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


@dataclass(frozen=True)
class Named:
    """One parameter: its name in the whole model, this rank's tensor and, if it is cut, how."""

    name: str
    parameter: torch.nn.Parameter
    shard: Shard | None

    def whole_shape(self) -> list[int]:
        """The shape of the whole tensor."""
        local = self.parameter.shape
        return list(local) if self.shard is None else self.shard.whole_shape(local)


def parameters(chunk: torch.nn.Module, groups: Groups) -> Iterator[Named]:
    """Every parameter of one bare GPTModel chunk; layers count over all stages, experts over all ranks."""
    gated = chunk.config.gated_linear_unit
    for path, parameter in chunk.named_parameters():
        name = _global_name(chunk, path, groups)
        axis = groups.etp if ".experts." in name else groups.tp
        yield Named(name, parameter, _shard(name, parameter, axis, gated))


def _global_name(chunk: torch.nn.Module, path: str, groups: Groups) -> str:
    parts: list[str] = []
    module, above = chunk, ""
    for part in path.split("."):
        child = getattr(module, part)
        if part.isdigit() and above == "layers" and parts[:1] == ["decoder"]:
            part = str(child.layer_number - 1)
        elif part.isdigit() and above == "local_experts":
            part = str(int(part) + groups.ep.rank * len(module))
        parts.append(_RENAMED.get(part, part))
        module, above = child, part
    name = ".".join(parts)
    if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    return name


def _shard(name: str, parameter: torch.nn.Parameter, axis: Axis, gated: bool) -> Shard | None:
    dim = getattr(parameter, "partition_dim", -1)
    if axis.size == 1 or dim < 0 or not getattr(parameter, "tensor_model_parallel", False):
        return None
    blocks = 2 if gated and ".linear_fc1." in name else 1
    return Shard(dim, axis.rank, axis.size, blocks)
