"""What wrappers read while megatron runs."""

import threading

import pytest
import torch

from bundle.errors import JobFailed
from bundle.mcore.context import Routes, Slot, in_backward


@pytest.fixture
def router() -> torch.nn.Module:
    return torch.nn.Identity()


def test_a_slot_is_restored_after_an_error_and_is_the_same_in_every_thread():
    slot = Slot("before")
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
    y.register_hook(lambda _: seen.append(in_backward()))
    assert not in_backward()
    y.backward()
    assert seen == [True]


def test_recorded_routes_are_the_routers_own(router):
    routes, own = Routes(replay=False), torch.tensor([[1, 0]])
    assert routes.choose(router, own) is own
    own.zero_()
    assert routes.recorded[router][0].tolist() == [[1, 0]]


def test_given_routes_are_taken_in_order_and_free_rows_keep_the_routers_choice(router):
    routes, own = Routes(replay=True), torch.tensor([[1, 0], [2, 3]])
    routes.give(router, torch.tensor([[5, 6], [-1, -1]]))
    routes.give(router, torch.tensor([[7, 7], [7, 7]]))
    assert routes.choose(router, own).tolist() == [[5, 6], [2, 3]]
    assert routes.choose(router, own).tolist() == [[7, 7], [7, 7]]


@pytest.mark.parametrize(
    ("given", "message"), [([], "no routes"), ([torch.zeros(3, 2)], r"\(3, 2\).*\(2, 2\)")]
)
def test_routes_that_do_not_fit_are_refused(router, given, message):
    routes = Routes(replay=True)
    for one in given:
        routes.give(router, one.long())
    with pytest.raises(JobFailed, match=message):
        routes.choose(router, torch.zeros(2, 2, dtype=torch.long))


def test_a_recomputation_takes_the_routes_of_its_own_first_pass(router):
    routes, own = Routes(replay=True), torch.tensor([[0, 1]])
    first, second = torch.tensor([[2, 3]]), torch.tensor([[4, 5]])
    for given in (first, second):  # two micro-batches in flight
        routes.give(router, given)
        with torch.no_grad():
            routes.choose(router, own)
    seen: list[list[list[int]]] = []
    for _ in range(2):
        y = torch.ones(1, requires_grad=True) * 2
        y.register_hook(lambda _: seen.append(routes.choose(router, own).tolist()))
        y.backward()
    assert seen == [first.tolist(), second.tolist()]
