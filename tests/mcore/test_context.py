"""What wrappers read while megatron runs."""

import threading

import pytest
import torch

from bundle.errors import JobFailed
from bundle.mcore.context import ForcedRoutes, ProcessWideOverride, RouterChoices, is_in_backward


@pytest.fixture
def router() -> torch.nn.Module:
    return torch.nn.Identity()


def test_a_slot_is_restored_after_an_error_and_is_the_same_in_every_thread():
    slot = ProcessWideOverride("before")
    seen: list[str] = []
    with pytest.raises(ZeroDivisionError), slot.set("during"):
        thread = threading.Thread(target=lambda: seen.append(slot.get()))
        thread.start()
        thread.join()
        raise ZeroDivisionError
    assert (seen, slot.get()) == (["during"], "before")


def test_only_a_backward_pass_is_one():
    seen: list[bool] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append(is_in_backward()))
    assert not is_in_backward()
    y.backward()
    assert seen == [True]


def test_choices_are_kept_by_layer_and_those_of_other_routers_left_alone(router):
    choices, own = RouterChoices({router: 4}, torch.uint8, has_backward=False), torch.tensor([[1, 0]])
    with choices.record_forward(None) as made:
        assert choices.choose(router, own) is own
        assert choices.choose(torch.nn.Identity(), own) is own
    assert made.keys() == {4}
    assert (made[4].dtype, made[4].tolist()) == (torch.uint8, [[1, 0]])


def test_rows_that_are_not_forced_keep_the_routers_choice(router):
    choices, own = RouterChoices({router: 4}, torch.uint8, has_backward=False), torch.tensor([[1, 0], [2, 3]])
    experts = torch.tensor([[5, 6], [7, 7]], dtype=torch.uint8)
    with choices.record_forward(ForcedRoutes({4: experts}, torch.tensor([True, False]))) as made:
        assert choices.choose(router, own).tolist() == [[5, 6], [2, 3]]
    assert made[4].tolist() == [[5, 6], [2, 3]]
    with choices.record_forward(ForcedRoutes({4: experts})):
        chosen = choices.choose(router, own)
        assert (chosen.dtype, chosen.tolist()) == (own.dtype, [[5, 6], [7, 7]])


def test_experts_that_do_not_fit_the_tokens_are_refused(router):
    choices = RouterChoices({router: 4}, torch.uint8, has_backward=False)
    with (
        choices.record_forward(ForcedRoutes({4: torch.zeros(3, 2)})),
        pytest.raises(JobFailed, match=r"layer 4 .*\[3, 2\].*\[2, 2\]"),
    ):
        choices.choose(router, torch.zeros(2, 2, dtype=torch.long))


def test_a_recomputation_takes_the_choices_of_its_own_first_pass(router):
    choices, own = RouterChoices({router: 4}, torch.uint8, has_backward=True), torch.tensor([[0, 1]])
    first, second = torch.tensor([[2, 3]]), torch.tensor([[4, 5]])
    for given in (first, second):  # two micro-batches in flight
        with choices.record_forward(ForcedRoutes({4: given})), torch.no_grad():
            choices.choose(router, own)
    seen: list[list[list[int]]] = []
    for _ in range(2):
        y = torch.ones(1, requires_grad=True) * 2
        y.register_hook(lambda _: seen.append(choices.choose(router, own).tolist()))
        y.backward()
    assert seen == [first.tolist(), second.tolist()]
