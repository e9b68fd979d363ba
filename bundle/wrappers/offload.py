"""The optimizer that keeps weights and states on the host: what it steps when either is loaded."""

import functools
from collections.abc import Callable
from typing import Any

import torch


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
