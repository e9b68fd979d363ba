"""The distributed optimizer without Transformer Engine, and the one that keeps its state on the host."""

import functools
from collections.abc import Callable, Sized
from typing import Any

import torch


def quantize_only_what_there_is(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `quantize_param_shard` that does nothing for no FP8 parameters.

    Every optimizer step calls it, and the original refuses without Transformer Engine before it looks.
    """

    @functools.wraps(original)
    def quantize_param_shard(model_params: Sized, *args: Any, **kwargs: Any) -> Any:
        return original(model_params, *args, **kwargs) if len(model_params) else None

    return quantize_param_shard


def every_copy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `DistributedOptimizer._copy_model_params_to_main_params` that reaches what is stepped.

    The original leaves early where the inner optimizer is a HybridDeviceOptimizer: so it is run once more
    without one, which fills this rank's fp32 shards, and then the inner optimizer's copies are filled.
    """

    @functools.wraps(original)
    def _copy_model_params_to_main_params(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        hybrid = self.optimizer
        sharded_by_fsdp = getattr(self.ddp_config, "use_megatron_fsdp", False) or getattr(
            self.ddp_config, "use_custom_fsdp", False
        )
        if not hasattr(hybrid, "param_to_inner_param") or sharded_by_fsdp:
            return
        self.optimizer = None
        try:
            original(self, *args, **kwargs)
        finally:
            self.optimizer = hybrid
        with torch.no_grad():
            for parameter, stepped in hybrid.param_to_inner_param.items():
                if stepped is not parameter:
                    stepped.copy_(parameter)

    return _copy_model_params_to_main_params


def those_with_a_copy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `HybridDeviceOptimizer._update_fp32_params_by_new_state` for parameters that are fp32 too.

    They are stepped themselves and have no fp32 copy to fill, which the original looks up.
    """

    @functools.wraps(original)
    def _update_fp32_params_by_new_state(self: Any) -> None:
        states = self.state
        self.state = {p: state for p, state in states.items() if p in self.param_to_fp32_param}
        try:
            original(self)
        finally:
            self.state = states

    return _update_fp32_params_by_new_state
