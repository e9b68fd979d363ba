"""What else the tensors of the table are called: by Transformer Engine's layer specs, and in checkpoints.

These specs fold norms into the projection behind them, and make one module of the experts of a rank.
Megatron-core's distributed checkpoints (`torch_dist`) have the same keys in all minors from 0.12 to 0.19, but
layers may be stacked along a dimension of their own, and norms have the names of either spec.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from bundle.architectures.architecture import Architecture
from bundle.architectures.tensors import Tensor, is_expert

# Projection: the norm before it in the same layer, which becomes its `layer_norm_weight`.
_FOLDED = {
    "self_attention.linear_qkv": "input_layernorm",
    "self_attention.in_proj": "input_layernorm",
    "self_attention.linear_q_up_proj": "self_attention.q_layernorm",
    "self_attention.linear_kv_up_proj": "self_attention.kv_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
}
_NORM = "layer_norm_weight"
_LOCAL_EXPERT = re.compile(r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$")
# `experts.linear_fc1.weight3` of a GroupedLinear: the weight of the rank's fourth expert.
_GROUPED = re.compile(r"experts\.(linear_fc[12])\.(weight|bias)(\d+)$")


def with_folded_norms(at: str, layer: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a decoder layer whose names begin with `at`, in the order of registration."""
    there = {tensor.name: tensor for tensor in layer}
    folds = {
        f"{at}{projection}.weight": f"{at}{norm}.weight"
        for projection, norm in _FOLDED.items()
        if f"{at}{projection}.weight" in there
    }
    for tensor in layer:
        if tensor.name in folds.values():
            continue
        if tensor.name in folds:
            projection = tensor.name.removesuffix("weight")
            yield f"{projection}{_NORM}", there[folds[tensor.name]]
        yield tensor.name, tensor


def with_grouped_experts(named: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same with the experts of one rank as one module: all their first matrices, then the second ones."""
    experts = [(name, tensor) for name, tensor in named if is_expert(name)]
    for name, tensor in named:
        if not is_expert(name):
            yield name, tensor
        elif experts:
            for projection in ("linear_fc1", "linear_fc2"):
                of_it = [(name, tensor) for name, tensor in experts if f".{projection}." in name]
                local = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in of_it))
                for name, tensor in of_it:
                    number = local.index(name.rpartition(".")[0])
                    yield _LOCAL_EXPERT.sub(rf"experts.\2.\g<3>{number}", name), tensor
            experts = []


def norm_of(name: str) -> str | None:
    """What the spec of megatron-core calls a folded norm; `name` itself where there is none in it.

    None: a norm has been folded into a projection that no release known to us folds.
    """
    projection, _, kind = name.rpartition(".")
    if not kind.startswith("layer_norm_"):
        return name
    for folded, norm in _FOLDED.items():
        if projection.endswith(folded):
            return f"{projection.removesuffix(folded)}{norm}.{kind.removeprefix('layer_norm_')}"
    return None


def expert_of(name: str, first: int) -> str:
    """The name of its own that an expert's tensor has; `first` is the number of the rank's first expert."""
    found = _GROUPED.search(name)
    if found is None:
        return name
    projection, kind, local = found.groups()
    return f"{name[: found.start()]}experts.local_experts.{first + int(local)}.{projection}.{kind}"


_LAYER = re.compile(r"((?:decoder|mtp)\.layers)\.(\d+)\.(transformer_layer\.)?(.*)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.*)")


class Place(NamedTuple):
    """A tensor is this `entry` of what `key` holds, whose leading dimensions have so many `entries`."""

    key: str
    entry: tuple[int, ...] = ()
    entries: tuple[int, ...] = ()


def places(tensor: Tensor, architecture: Architecture) -> tuple[Place, ...]:
    """Everywhere that a tensor may be; a checkpoint has it at one of them at least."""
    stacked, apart = (_places(tensor, architecture, stacked=stacked) for stacked in (True, False))
    return tuple(dict.fromkeys((*stacked, *apart)))


def written(tensor: Tensor, architecture: Architecture) -> tuple[Place, ...]:
    """Where to write a tensor so that models of either layer spec find it.

    Layers of a dense model are stacked, as every release expects. Those of a model with experts are not:
    whether they are expected to be depends on the form of `moe_layer_freq`, and `content` says it.
    """
    return tuple(_places(tensor, architecture, stacked=architecture.moe is None))


def checkpoint_content(architecture: Architecture) -> dict[str, bool]:
    """What megatron-core is to know about the content of what is `written` before it asks for keys."""
    return {"non_homogeneous_layers": architecture.moe is not None, "singleton_local_shards": False}


def extra_states(places: Iterable[Place]) -> Iterator[Place]:
    """What modules keep besides tensors: Transformer Engine's FP8 state, empty without; models ask for it."""
    for place in places:
        module, _, kind = place.key.rpartition(".")
        above, _, leaf = module.rpartition(".")
        if kind != "weight" or not (leaf.startswith("linear_") or leaf == "eh_proj"):
            continue
        yield place._replace(key=f"{module}._extra_state")
        if leaf == "linear_proj":
            yield place._replace(key=f"{above}.core_attention._extra_state")


def object_key(place: Place) -> str:
    """What megatron-core calls an object that is no tensor: the key, the entry, and of how many."""
    entry, entries = (".".join(map(str, of)) for of in (place.entry or (0,), place.entries or (1,)))
    return f"{place.key}/shard_{entry}_{entries}"


def stacked(key: str) -> int:
    """Along how many leading dimensions many tensors lie under a key: layers, experts."""
    return bool(re.search(r"decoder\.layers\.(?!\d)", key)) + (".experts.experts." in key)


def _places(tensor: Tensor, architecture: Architecture, *, stacked: bool) -> Iterator[Place]:
    found = _LAYER.fullmatch(tensor.name)
    if found is None:
        yield Place(tensor.name)
        return
    layers, number, inner, rest = found.groups()
    entry: tuple[int, ...] = ()
    entries: tuple[int, ...] = ()
    decoder = layers.startswith("decoder")
    routed = bool(architecture.layer_pattern[int(number) if decoder else -1])
    if expert := _EXPERT.fullmatch(rest):
        assert architecture.moe is not None
        entry, entries = (int(expert[1]),), (architecture.moe.num_experts,)
        rest = f"mlp.experts.experts.{expert[2]}"
    for module in _spellings(rest, latent=architecture.mla is not None, routed=routed):
        if stacked and decoder:
            yield Place(f"{layers}.{module}", (int(number), *entry), (architecture.num_layers, *entries))
        else:
            yield Place(f"{layers}.{number}.{inner or ''}{module}", entry, entries)


def _spellings(name: str, *, latent: bool, routed: bool) -> tuple[str, ...]:
    """What both specs call a tensor of a layer, megatron-core's own first."""
    if name == "input_layernorm.weight" and not latent:
        return (f"self_attention.linear_qkv.{_NORM}",)
    if name == "pre_mlp_layernorm.weight":
        folded = f"mlp.linear_fc1.{_NORM}"
        own = name if latent else folded
        return tuple(dict.fromkeys((own, name if routed else folded)))
    if latent and (norm := re.fullmatch(r"self_attention\.(q|kv)_layernorm\.weight", name)):
        return name, f"self_attention.linear_{norm[1]}_up_proj.{_NORM}"
    return (name,)
