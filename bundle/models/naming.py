"""The name of every parameter, the same in every layout and spec, and which part of it this rank holds.

Transformer Engine's specs build other modules than megatron's own: norms are folded into the projection
behind them, and the experts of a rank are one module. Names here are those of megatron's own specs, expert by
expert.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bundle.errors import JobFailed
from bundle.mcore.groups import Groups

# Releases from 0.17 call the transformer layer inside an MTP layer differently.
_RENAMED = {"mtp_model_layer": "transformer_layer"}

# Projection of a Transformer Engine spec: the norm that it has swallowed (its `layer_norm_weight`).
_FOLDED = {
    "self_attention.linear_qkv": "input_layernorm",
    "self_attention.linear_q_up_proj": "self_attention.q_layernorm",
    "self_attention.linear_kv_up_proj": "self_attention.kv_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
}
_NORM = "layer_norm_"

# `experts.linear_fc1.weight3` of Transformer Engine's GroupedLinear: the weight of the rank's fourth expert.
_GROUPED = re.compile(r"experts\.(linear_fc[12])\.(weight|bias)(\d+)$")


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
        owner = chunk.get_submodule(path.rpartition(".")[0])
        name = _unfolded(_global_name(chunk, path, groups), owner, groups)
        yield Named(name, parameter, _shard(name, parameter, owner, groups, gated=gated))


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


def _unfolded(name: str, owner: torch.nn.Module, groups: Groups) -> str:
    """The name that megatron's own specs have for a parameter of a Transformer Engine module."""
    if grouped := _GROUPED.search(name):
        projection, kind, local = grouped.groups()
        expert = int(local) + groups.ep.rank * owner.num_gemms
        return f"{name[: grouped.start()]}experts.local_experts.{expert}.{projection}.{kind}"
    projection, _, kind = name.rpartition(".")
    if not kind.startswith(_NORM):
        return name
    for folded, norm in _FOLDED.items():
        if projection.endswith(folded):
            return f"{projection.removesuffix(folded)}{norm}.{kind.removeprefix(_NORM)}"
    raise JobFailed(
        f"{name}: Transformer Engine has folded a norm into a projection that no release known to us folds;"
        " its name in megatron's own specs belongs into bundle.models.naming"
    )


def _shard(
    name: str, parameter: torch.nn.Parameter, owner: torch.nn.Module, groups: Groups, *, gated: bool
) -> Shard | None:
    expert = ".experts." in name
    axis, dim = (groups.etp, _expert_dim(name)) if expert else (groups.tp, _dim(parameter, owner))
    if axis.size == 1 or dim is None:
        return None
    blocks = 2 if gated and ".linear_fc1." in name else 1
    return Shard(dim, axis.rank, axis.size, blocks)


def _expert_dim(name: str) -> int | None:
    """By name: Transformer Engine is not told that its experts' weights are parts, and marks none."""
    if ".linear_fc1." in name:
        return 0
    return 1 if name.endswith(".linear_fc2.weight") else None


def _dim(parameter: torch.nn.Parameter, owner: torch.nn.Module) -> int | None:
    # Transformer Engine marks the weights of duplicated layers like those of column-parallel ones.
    duplicated = getattr(owner, "parallel_mode", "as marked") is None
    if duplicated or not getattr(parameter, "tensor_model_parallel", False):
        return None
    return int(parameter.partition_dim)
