"""The distributed optimizer's state in distributed checkpoints."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def reshardable_by_default(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `DistributedOptimizer.sharded_state_dict` whose default form can be saved (0.16 and later)."""

    @functools.wraps(original)
    def sharded_state_dict(
        self: Any,
        model_sharded_state_dict: Any = None,
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: Any = None,
    ) -> Any:
        asked = dict(metadata or {})
        if sharding_type is None and not getattr(self.ddp_config, "use_megatron_fsdp", False):
            asked.setdefault("distrib_optim_sharding_type", "fully_reshardable")
        return original(self, model_sharded_state_dict or {}, is_loading, sharding_type, asked)

    return sharded_state_dict


def steps_as_loaded(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `DistributedOptimizer.load_parameter_state_from_dp_reshardable` that leaves Adam's steps alone.

    They come with the parameter groups and are there already. The shards bring those of the time when the
    places to load into were made.
    """

    @functools.wraps(original)
    def load_parameter_state_from_dp_reshardable(self: Any, state_dict: Any) -> Any:
        states = self.optimizer.state
        steps = {p: s["step"].clone() for p, s in states.items() if torch.is_tensor(s.get("step"))}
        loaded = original(self, state_dict)
        for parameter, step in steps.items():
            states[parameter]["step"] = step
        return loaded

    return load_parameter_state_from_dp_reshardable
