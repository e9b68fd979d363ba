"""Megatron's optimizer that keeps weights and states on the host."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

OPTIONS = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}  # of OptimizerConfig


def hybrid(parameters: Sequence[torch.nn.Parameter]) -> HybridDeviceOptimizer:
    """Adam on the host over parameters of any dtype, its steps in fp32."""
    adam = torch.optim.AdamW
    options: dict[str, Any] = {"cpu_optimizer_cls": adam, "gpu_optimizer_cls": adam, "offload_fraction": 1.0}
    group = {"params": list(parameters), "lr": 1e-3}
    return HybridDeviceOptimizer([group], param_update_in_fp32=True, pin_cpu_grads=False, **options)


def stepped(optimizer: Any) -> list[torch.Tensor]:
    """What the parts of an offloaded optimizer step, copies or not, in their order."""
    distributed = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    return [
        parameter
        for each in distributed
        for part in each.optimizer.sub_optimizers
        for group in part.param_groups
        for parameter in group["params"]
    ]
