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

    AddGradient = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class Runtime(Protocol):
    """Everything that differs by accelerator and needs torch; each backend has one object of this shape."""

    collectives: str
    """The torch.distributed backend: gloo, nccl or hccl."""

    @property
    def noncausal_packed_attention(self) -> "Callable[..., torch.Tensor] | None":
        """The function that attends all sequences of a pack at once without causality, as `cuda.vision` does.

        Layers that are not megatron's call it. None where torch attends the sequences one after the other.
        """

    @property
    def add_weight_gradient(self) -> "AddGradient | None":
        """The product that adds to the gradient of a weight: `cuda.weight_gradients.add_weight_gradient`.

        None where torch adds the result of a product.
        """

    def select_device(self, local_rank: int) -> "torch.device":
        """Return the device of this rank, after making it the current one."""

    def megatron_calls(self) -> AbstractContextManager[Any]:
        """Return the context in which megatron is called."""

    def build_config_options(self, recipe: "Recipe") -> dict[str, Any]:
        """Return the TransformerConfig fields that depend on the accelerator: fusions, grouped GEMM, FP8."""

    def needs_torch_adam_fusion(self, recipe: "Recipe") -> bool:
        """Return whether torch's Adam, where megatron takes it, updates by torch's fused kernel."""

    def build_specs(self, recipe: "Recipe", config: "TransformerConfig", chunk: int | None) -> "Specs":
        """Return the specs of model chunk `chunk`, with the layers that run on this accelerator."""


def set_up_runtime(backend: str, recipe: "Recipe | None" = None) -> Runtime:
    """Return the runtime of a backend (cpu, cuda, ascend) for this process, before megatron is imported.

    The `backend_options` of `recipe` choose the runtime where a recipe is passed. Raises EnvironmentUnfit
    where this machine, or a module that was imported earlier, does not allow it.
    """
    package = importlib.import_module(f"bundle.backends.{backend}")
    runtime: Runtime
    if recipe is not None and recipe.backend_options.mindspeed:  # a plan refuses it on other backends
        runtime = importlib.import_module(f"{package.__name__}.mindspeed").set_up_runtime(recipe)
    else:
        runtime = package.set_up_runtime()
    return runtime
