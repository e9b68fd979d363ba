"""The experts that a router chooses while, and after, a step with given ones raised.

python -m tests.upstream.replaying prints them by the way in which they were given, or null where this
megatron-core cannot replay routes.
"""

import importlib
import json
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from bundle import backends
from bundle.mcore import context
from bundle.replacements.moe import override_native_replay

EXPERTS, TOPK = 8, 2
GIVEN = torch.tensor([[1, 0], [3, 2], [5, 4]])

Chosen = list[list[int]]


def main() -> None:
    runtime = backends.set_up_runtime("cpu")
    try:
        replay = importlib.import_module("megatron.core.transformer.moe.router_replay")
    except ModuleNotFoundError:
        print(json.dumps(None))
        return
    with runtime.megatron_calls():
        print(json.dumps({"global": by_global_action(replay), "choices": by_choices(replay)}))


class Router:
    """Chooses experts [3, k] for three tokens, as TopKRouter does; its RouterReplay stands for it."""

    def __init__(self, replay: ModuleType) -> None:
        self.router_replay = replay.RouterReplay()

    def choose(self) -> Chosen:
        from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

        scores = torch.arange(3.0 * EXPERTS).view(3, EXPERTS)  # by itself: the last two experts
        _, chosen = topk_routing_with_score_function(scores, TOPK, router_replay=self.router_replay)
        experts: Chosen = chosen.nonzero()[:, 1].view(3, TOPK).tolist()
        return experts


def by_global_action(replay: ModuleType) -> dict[str, Chosen]:
    """As upstream does: an action for all routers, taken away at the end of the step."""
    router, of = Router(replay), replay.RouterReplay
    seen = {"before": router.choose()}
    try:
        of.set_replay_data([GIVEN])
        of.set_global_router_replay_action(replay.RouterReplayAction.REPLAY_FORWARD)
        seen["inside"] = router.choose()
        raise ZeroDivisionError  # out of memory, a bad sample
        of.clear_global_router_replay_action()
    except ZeroDivisionError:
        seen["after"] = router.choose()  # an evaluation, the next step: nobody asked for these experts
    of.clear_global_router_replay_instances()
    return seen


def by_choices(replay: ModuleType) -> dict[str, Chosen]:
    """As the engine does."""
    router, of = Router(replay), replay.RouterReplay
    choices: Any = context.RouterChoices({router.router_replay: 0}, torch.uint8, has_backward=True)
    with patch.object(of, "get_replay_topk", override_native_replay(of.get_replay_topk)):
        seen = {"before": router.choose()}
        try:
            with (
                context.router_choices.set(choices),
                choices.record_forward(context.ForcedRoutes({0: GIVEN})),
            ):
                seen["inside"] = router.choose()
                raise ZeroDivisionError
        except ZeroDivisionError:
            seen["after"] = router.choose()
    return seen


if __name__ == "__main__":
    main()
