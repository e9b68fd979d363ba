"""Stand-ins for model chunks: parameters of megatron's own specs and of Transformer Engine's, with marks.

The marks of Transformer Engine's trees are those of real models (2.14.1, megatron-core 0.16.1, an H200).
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from bundle.mcore.groups import Groups, ParallelGroup

LISTS = ("layers", "local_experts")


@dataclass(frozen=True)
class Weight:
    """One parameter: `dim` is its mark as a part (None: no mark); `mode` its module's parallel_mode."""

    shape: tuple[int, ...]
    dim: int | None = None
    mode: str | None = "no such attribute"
    gemms: int = 0


def groups(**axes: tuple[int, int]) -> Groups:
    """Groups whose axes have (size, rank) as given, and one rank elsewhere."""
    one = ParallelGroup(1, 0, None)  # type: ignore[arg-type]
    alone = Groups(one, one, one, one, one, one, vpp=1)
    return replace(alone, **{name: ParallelGroup(*given, None) for name, given in axes.items()})  # type: ignore[arg-type]


def chunk(weights: dict[str, Weight]) -> torch.nn.Module:
    """A chunk with these parameters, whose layers count from 0."""
    root = torch.nn.Module()
    root.config = SimpleNamespace(gated_linear_unit=True)
    root.share_embeddings_and_output_weights = False
    for path, weight in weights.items():
        *above, leaf = path.split(".")
        owner = root
        for name in above:
            if name not in owner._modules:
                owner.add_module(name, torch.nn.ModuleList() if name in LISTS else torch.nn.Module())
            owner = owner.get_submodule(name)
            if name.isdigit():
                owner.layer_number = int(name) + 1
        if weight.mode != "no such attribute":
            owner.parallel_mode = weight.mode
        if weight.gemms:
            owner.num_gemms = weight.gemms
        parameter = torch.nn.Parameter(torch.full(weight.shape, torch.nan))
        if weight.dim is not None:
            parameter.tensor_model_parallel, parameter.partition_dim = True, weight.dim
        owner.register_parameter(leaf, parameter)
    return root
