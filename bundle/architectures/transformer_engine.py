"""What Transformer Engine's layer specs call the tensors of a model: norms are folded into the projection
behind them, and the experts of a rank are one module.
"""

import re
from collections.abc import Iterator, Sequence

from bundle.architectures.tensors import Tensor, is_expert

# Projection: the norm before it in the same layer, which becomes its `layer_norm_weight`.
_FOLDED = {
    "self_attention.linear_qkv": "input_layernorm",
    "self_attention.linear_q_up_proj": "self_attention.q_layernorm",
    "self_attention.linear_kv_up_proj": "self_attention.kv_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
}
_NORM = "layer_norm_weight"
_EXPERT = re.compile(r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight)$")
# `experts.linear_fc1.weight3` of a GroupedLinear: the weight of the rank's fourth expert.
_GROUPED = re.compile(r"experts\.(linear_fc[12])\.(weight)(\d+)$")


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
                for number, (name, tensor) in enumerate(of_it):
                    yield _EXPERT.sub(rf"experts.\2.\g<3>{number}", name), tensor
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
