"""Find the other names of the table's tensors: in Transformer Engine's layer specs, and in checkpoints.

These specs fold norms into the projection behind them, and make one module of the experts of a rank.
Megatron-core's distributed checkpoints (`torch_dist`) have the same keys in all minors from 0.12 to 0.19. But
layers may be stacked along a dimension of their own, and norms have the names of either spec.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from bundle.architectures.architecture import Architecture
from bundle.architectures.tensors import Tensor, is_expert

# Projection: the norm before it in the same layer, which becomes its `layer_norm_weight`.
_NORM_BY_PROJECTION = {
    "self_attention.linear_qkv": "input_layernorm",
    "self_attention.in_proj": "input_layernorm",
    "self_attention.linear_q_up_proj": "self_attention.q_layernorm",
    "self_attention.linear_kv_up_proj": "self_attention.kv_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
}
_FUSED_NORM_WEIGHT_NAME = "layer_norm_weight"
_LOCAL_EXPERT_PARAMETER_PATTERN = re.compile(
    r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$"
)
# `experts.linear_fc1.weight3` of a GroupedLinear: the weight of the rank's fourth expert.
_GROUPED_EXPERT_PARAMETER_PATTERN = re.compile(r"experts\.(linear_fc[12])\.(weight|bias)(\d+)$")


def rename_norms_to_fused(prefix: str, layer: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a decoder layer whose names begin with `prefix`, in the order of registration.

    A norm that Transformer Engine folds has the name of its projection's `layer_norm_weight`.
    """
    tensors = {tensor.name: tensor for tensor in layer}
    folds = {
        f"{prefix}{projection}.weight": f"{prefix}{norm}.weight"
        for projection, norm in _NORM_BY_PROJECTION.items()
        if f"{prefix}{projection}.weight" in tensors
    }
    for tensor in layer:
        if tensor.name in folds.values():
            continue
        if tensor.name in folds:
            projection = tensor.name.removesuffix("weight")
            yield f"{projection}{_FUSED_NORM_WEIGHT_NAME}", tensors[folds[tensor.name]]
        yield tensor.name, tensor


def rename_experts_to_grouped_linear(named: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) with the experts of one rank as one module.

    All first matrices of the experts come before the second ones.
    """
    experts = [(name, tensor) for name, tensor in named if is_expert(name)]
    for name, tensor in named:
        if not is_expert(name):
            yield name, tensor
        elif experts:
            for projection in ("linear_fc1", "linear_fc2"):
                projection_tensors = [(name, tensor) for name, tensor in experts if f".{projection}." in name]
                local = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in projection_tensors))
                for name, tensor in projection_tensors:
                    number = local.index(name.rpartition(".")[0])
                    yield _LOCAL_EXPERT_PARAMETER_PATTERN.sub(rf"experts.\2.\g<3>{number}", name), tensor
            experts = []


def to_unfused_name(name: str) -> str | None:
    """Return the name of a folded norm in megatron-core's spec; `name` itself where no norm is folded.

    None: a norm has been folded into a projection that no known release folds.
    """
    projection, _, kind = name.rpartition(".")
    if not kind.startswith("layer_norm_"):
        return name
    for folded, norm in _NORM_BY_PROJECTION.items():
        if projection.endswith(folded):
            return f"{projection.removesuffix(folded)}{norm}.{kind.removeprefix('layer_norm_')}"
    return None


def to_sequential_expert_name(name: str, first_expert: int) -> str:
    """Return the name that an expert's tensor has as a module of its own.

    `first_expert` is the number of the rank's first expert.
    """
    match = _GROUPED_EXPERT_PARAMETER_PATTERN.search(name)
    if match is None:
        return name
    projection, kind, local = match.groups()
    return f"{name[: match.start()]}experts.local_experts.{first_expert + int(local)}.{projection}.{kind}"


_LAYER_PARAMETER_PATTERN = re.compile(r"((?:decoder|mtp)\.layers)\.(\d+)\.(transformer_layer\.)?(.*)")
_EXPERT_PATTERN = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.*)")


class CheckpointLocation(NamedTuple):
    """The place of a tensor: an `entry` of the tensor under `key`, whose leading dimensions are `entries`."""

    key: str
    entry: tuple[int, ...] = ()
    entries: tuple[int, ...] = ()


def list_candidate_torch_dist_locations(
    tensor: Tensor, architecture: Architecture
) -> tuple[CheckpointLocation, ...]:
    """Return every place where a tensor may be; a checkpoint has it at one of them at least."""
    stacked, separate = (
        _iterate_torch_dist_locations(tensor, architecture, is_stacked=stacked) for stacked in (True, False)
    )
    return tuple(dict.fromkeys((*stacked, *separate)))


def find_torch_dist_save_locations(
    tensor: Tensor, architecture: Architecture
) -> tuple[CheckpointLocation, ...]:
    """Return where to write a tensor, so that models of either layer spec find it.

    Layers of a dense model are stacked, as every release expects. Layers of a model with experts are not:
    what is expected depends on the form of `moe_layer_freq` (`build_key_layout_metadata`).
    """
    return tuple(_iterate_torch_dist_locations(tensor, architecture, is_stacked=architecture.moe is None))


def build_key_layout_metadata(architecture: Architecture) -> dict[str, bool]:
    """Return what megatron-core must know about `find_torch_dist_save_locations` before it asks for keys."""
    return {"non_homogeneous_layers": architecture.moe is not None, "singleton_local_shards": False}


def derive_extra_state_locations(locations: Iterable[CheckpointLocation]) -> Iterator[CheckpointLocation]:
    """Yield the places of the extra states of modules, which models ask for.

    An extra state is Transformer Engine's FP8 state, and empty without FP8.
    """
    for location in locations:
        module, _, kind = location.key.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        if kind != "weight" or not (leaf.startswith("linear_") or leaf == "eh_proj"):
            continue
        yield location._replace(key=f"{module}._extra_state")
        if leaf == "linear_proj":
            yield location._replace(key=f"{parent}.core_attention._extra_state")


def build_object_key(location: CheckpointLocation) -> str:
    """Return megatron-core's key of an object that is not a tensor: the key, the entry, and the entries."""
    entry, entries = (
        ".".join(map(str, indices)) for indices in (location.entry or (0,), location.entries or (1,))
    )
    return f"{location.key}/shard_{entry}_{entries}"


def count_layer_and_expert_dims(key: str) -> int:
    """Return the number of leading dimensions that stack tensors under a key: layers, experts."""
    return bool(re.search(r"decoder\.layers\.(?!\d)", key)) + (".experts.experts." in key)


def _iterate_torch_dist_locations(
    tensor: Tensor, architecture: Architecture, *, is_stacked: bool
) -> Iterator[CheckpointLocation]:
    match = _LAYER_PARAMETER_PATTERN.fullmatch(tensor.name)
    if match is None:
        yield CheckpointLocation(tensor.name)
        return
    layers, number, inner, rest = match.groups()
    entry: tuple[int, ...] = ()
    entries: tuple[int, ...] = ()
    is_decoder = layers.startswith("decoder")
    has_experts = bool(architecture.moe_layer_pattern[int(number) if is_decoder else -1])
    if expert := _EXPERT_PATTERN.fullmatch(rest):
        assert architecture.moe is not None
        entry, entries = (int(expert[1]),), (architecture.moe.num_experts,)
        rest = f"mlp.experts.experts.{expert[2]}"
    for module in _list_names(rest, is_latent=architecture.mla is not None, has_experts=has_experts):
        if is_stacked and is_decoder:
            yield CheckpointLocation(
                f"{layers}.{module}", (int(number), *entry), (architecture.num_layers, *entries)
            )
        else:
            yield CheckpointLocation(f"{layers}.{number}.{inner or ''}{module}", entry, entries)


def _list_names(name: str, *, is_latent: bool, has_experts: bool) -> tuple[str, ...]:
    """Return the names of a layer's tensor in both specs, megatron-core's own first."""
    if name == "input_layernorm.weight" and not is_latent:
        return (f"self_attention.linear_qkv.{_FUSED_NORM_WEIGHT_NAME}",)
    if name == "pre_mlp_layernorm.weight":
        folded = f"mlp.linear_fc1.{_FUSED_NORM_WEIGHT_NAME}"
        own_name = name if is_latent else folded
        return tuple(dict.fromkeys((own_name, name if has_experts else folded)))
    if is_latent and (norm := re.fullmatch(r"self_attention\.(q|kv)_layernorm\.weight", name)):
        return name, f"self_attention.linear_{norm[1]}_up_proj.{_FUSED_NORM_WEIGHT_NAME}"
    return (name,)
