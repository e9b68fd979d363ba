"""Where megatron-core's distributed checkpoints (`torch_dist`) keep the tensors of the table.

All eight minors from 0.12 to 0.19 have the same keys. Checkpoints differ in two ways: layers may be stacked
along a dimension of their own, and the layer specs of megatron-core and of Transformer Engine call some norms
differently.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from bundle.architectures.architecture import Architecture
from bundle.architectures.tensors import Tensor

_LAYER = re.compile(r"((?:decoder|mtp)\.layers)\.(\d+)\.(transformer_layer\.)?(.*)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.*)")
_FOLDED = "layer_norm_weight"  # behind the projection that a norm is folded into


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


def content(architecture: Architecture) -> dict[str, bool]:
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
        return (f"self_attention.linear_qkv.{_FOLDED}",)
    if name == "pre_mlp_layernorm.weight":
        folded = f"mlp.linear_fc1.{_FOLDED}"
        own = name if latent else folded
        return tuple(dict.fromkeys((own, name if routed else folded)))
    if latent and (norm := re.fullmatch(r"self_attention\.(q|kv)_layernorm\.weight", name)):
        return name, f"self_attention.linear_{norm[1]}_up_proj.{_FOLDED}"
    return (name,)
