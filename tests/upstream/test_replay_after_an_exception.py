"""Router replay after a step that raised: later steps go on choosing that step's experts.

verl (1dda039b9) sets an action and targets on all routers, runs the step, and takes them away afterwards, not
in a `finally`. So it is done with megatron's own RouterReplay, too: its state is that of the process.
"""

import pytest
import torch

from bundle.mcore import context
from bundle.wrappers.router import choice_in_replay

EXPERTS, TOPK = 8, 2
GIVEN = torch.tensor([[1, 0], [3, 2], [5, 4]])


@pytest.fixture
def router(megatron):
    """Chooses experts [3, k] for three tokens, as TopKRouter does; its RouterReplay stands for it."""
    replay = pytest.importorskip("megatron.core.transformer.moe.router_replay").RouterReplay
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    class Router:
        router_replay = replay()

        def choose(self):
            scores = torch.arange(3.0 * EXPERTS).view(3, EXPERTS)  # by itself: the last two experts
            _, chosen = topk_routing_with_score_function(scores, TOPK, router_replay=self.router_replay)
            return chosen.nonzero()[:, 1].view(3, TOPK).tolist()

    yield Router()
    replay.clear_global_router_replay_instances()


BY_ITSELF, AS_GIVEN = [[6, 7]] * 3, [[0, 1], [2, 3], [4, 5]]


def test_a_global_action_outlives_the_step(router):
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    assert router.choose() == BY_ITSELF
    with pytest.raises(ZeroDivisionError):
        RouterReplay.set_replay_data([GIVEN])
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        assert router.choose() == AS_GIVEN
        raise ZeroDivisionError  # out of memory, a bad sample
        RouterReplay.clear_global_router_replay_action()
    assert router.choose() == AS_GIVEN  # an evaluation, the next step: nobody asked for these experts


def test_choices_end_with_the_step(router, monkeypatch):
    from megatron.core.transformer.moe.router_replay import RouterReplay

    monkeypatch.setattr(RouterReplay, "get_replay_topk", choice_in_replay(RouterReplay.get_replay_topk))
    choices = context.Choices({router.router_replay: 0}, torch.uint8, backward=True)
    with (
        pytest.raises(ZeroDivisionError),
        context.choices.set(choices),
        choices.of_forward(context.Forced({0: GIVEN})),
    ):
        assert router.choose() == AS_GIVEN
        raise ZeroDivisionError
    assert router.choose() == BY_ITSELF
