"""The routers of a model, and megatron's own replay of their choices (0.16 and later)."""

import torch
from megatron.core.transformer.moe.router import TopKRouter


def routers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The routers of a model chunk in the order of its layers, those of multi-token prediction last."""
    return [module for module in model.modules() if isinstance(module, TopKRouter)]


def routers_of_layers(model: torch.nn.Module) -> dict[object, int]:
    """What asks for the experts of each decoder layer of a model chunk -> the layer, counted over all stages.

    Megatron's RouterReplay where the router has one, else the router. The routers of multi-token prediction
    are left out: their own layer numbers are those of other layers (1 in most releases).
    """
    return {
        getattr(router, "router_replay", None) or router: layer.layer_number - 1
        for layer in model.decoder.layers
        for router in routers(layer)
    }


def give_native_routes(router: torch.nn.Module, routes: torch.Tensor) -> None:
    """Has a router of a model with `moe_enable_routing_replay` take these experts [t, k] from now on."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    router.router_replay.set_target_indices(routes)
    router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
