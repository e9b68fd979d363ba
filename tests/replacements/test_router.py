"""megatron's own replay of routes, by itself: which routes a recomputation takes, and what was asked for."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture
def router() -> Iterator[Any]:
    replays = pytest.importorskip("megatron.core.transformer.moe.router_replay", reason="older than 0.16")
    made = replays.RouterReplay()
    made.set_router_replay_action(replays.RouterReplayAction.REPLAY_FORWARD)
    yield made
    replays.RouterReplay.global_router_replay_instances.remove(made)


def test_a_recomputation_takes_its_own_micro_batchs_routes(router):
    """Two micro-batches whose forward passes come before either backward pass, as in a pipeline."""
    from bundle.replacements.moe import keep_routes_on_recompute

    replayed, routes = (
        keep_routes_on_recompute(type(router).get_replay_topk),
        torch.tensor([[[0, 2]], [[3, 1]]]),
    )
    scores, action = torch.tensor([[0.1, 0.2, 0.3, 0.4]]), router.router_replay_action
    again: list[torch.Tensor] = []

    def recomputed(_: torch.Tensor) -> None:
        again.append(replayed(router, scores, 2)[1])
        assert router.router_replay_action is action

    outputs = []
    for of_micro_batch in routes:
        router.set_target_indices(of_micro_batch)
        assert torch.equal(replayed(router, scores, 2)[1], of_micro_batch)
        outputs.append(torch.ones(1, requires_grad=True) * 2)
        outputs[-1].register_hook(recomputed)
    for output in outputs:
        output.backward()
    assert torch.equal(torch.stack(again), routes)


def test_experts_that_are_asked_for_have_their_own_scores_and_the_other_tokens_stay(router):
    from bundle.mcore import context
    from bundle.replacements.moe import override_native_replay

    router.clear_router_replay_action()
    chosen = override_native_replay(type(router).get_replay_topk)
    scores = torch.rand(6, 8, requires_grad=True)
    wanted, rows = torch.stack([torch.randperm(8)[:2] for _ in range(6)]), torch.arange(6) % 3 > 0
    choices = context.RouterChoices({router: 5}, torch.uint8, has_backward=False)
    with (
        context.router_choices.set(choices),
        choices.record_forward(context.ForcedRoutes({5: wanted}, rows)) as made,
    ):
        values, experts = chosen(router, scores, 2, None, None, lambda s, k, *_: torch.topk(s, k))
    expected = torch.where(rows[:, None], wanted, scores.topk(2).indices)
    assert torch.equal(experts, expected) and torch.equal(made[5].long(), expected)
    values.sum().backward()
    assert torch.equal(scores.grad, torch.zeros(6, 8).scatter(1, expected, 1.0))
    assert torch.equal(values, torch.stack([row[own] for row, own in zip(scores, expected, strict=True)]))
