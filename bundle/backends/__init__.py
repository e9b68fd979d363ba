"""What differs by accelerator and needs torch; what is known of each without it stands in `capabilities`."""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    from bundle.mcore.gpt import Specs
    from bundle.recipe import Recipe


class Runtime(Protocol):
    """Everything that differs by accelerator and needs torch; each backend has one object of this shape."""

    collectives: str
    """The torch.distributed backend: gloo, nccl or hccl."""

    @property
    def packed_attention(self) -> "Callable[..., torch.Tensor] | None":
        """What attends all sequences of a pack at once in layers that are not megatron's, without causality,
        as `cuda.vision` has it; None where torch attends them one after the other."""

    def select_device(self, local_rank: int) -> "torch.device":
        """The device of this rank, made current."""

    def megatron_calls(self) -> AbstractContextManager[Any]:
        """The context in which megatron is called."""

    def build_config_options(self, recipe: "Recipe") -> dict[str, Any]:
        """TransformerConfig fields that depend on the accelerator: fusions, grouped GEMM, FP8."""

    def fuses_adam(self, recipe: "Recipe") -> bool:
        """Whether torch's Adam, where megatron takes it, updates by torch's fused kernel."""

    def build_specs(self, recipe: "Recipe", config: "TransformerConfig", chunk: int | None) -> "Specs":
        """The specs of model chunk `chunk`, with the layers that run on this accelerator."""


def prepare(backend: str, recipe: "Recipe | None" = None) -> Runtime:
    """The runtime of a backend (cpu, cuda, ascend), made ready in this process before megatron is imported.

    As the `backend_options` of `recipe` say, where there is one. Raises EnvironmentUnfit where this machine,
    or what was imported already, does not allow it.
    """
    package = importlib.import_module(f"bundle.backends.{backend}")
    runtime: Runtime
    if recipe is not None and recipe.backend_options.mindspeed:  # a plan refuses it on other backends
        runtime = importlib.import_module(f"{package.__name__}.mindspeed").prepare(recipe)
    else:
        runtime = package.prepare()
    return runtime
