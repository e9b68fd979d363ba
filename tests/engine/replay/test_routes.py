"""Routes: their type, what is refused, and how sequences are taken apart and put together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bundle.engine.routes import Routes, Routing, choose_dtype, join_routes
from bundle.errors import JobFailed
from bundle.packing.packing import Packing
from bundle.recipe.alignment import Alignment
from tests.matrix.cases import Case

ROUTING = Routing(layers=(1, 3), experts=8, topk=2)


@given(st.integers(1, 40_000))
def test_the_type_is_the_narrowest_that_names_every_expert(experts):
    dtype = choose_dtype(experts)
    assert torch.tensor(experts - 1).to(dtype).item() == experts - 1
    assert dtype == torch.uint8 or experts - 1 > 255
    assert dtype != torch.int32 or experts - 1 > 32767


def test_the_layers_of_a_model_are_those_with_experts_and_no_mtp():
    case = Case("", {})
    assert Routing.from_architecture(case.recipe().architecture) == Routing((1, 2, 3), 8, 2)


def test_columns_come_in_the_order_of_the_model_and_narrow():
    experts = torch.tensor([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    routes = ROUTING.build_checked_routes(experts, layers=(3, 1))
    assert routes.layers == (1, 3)
    assert routes.experts.dtype == torch.uint8
    assert torch.equal(routes.experts.long(), experts.flip(1))


def test_free_rows_may_hold_anything():
    experts = torch.tensor([[[0, 1], [2, 3]], [[-1, -1], [99, 99]]])
    routes = ROUTING.build_checked_routes(experts, (1, 3), free_mask=torch.tensor([False, True]))
    assert routes.experts[1].tolist() == [[0, 0], [0, 0]]


WRONG_FORM = [
    (torch.zeros(4, 2, 2), (1, 3), "torch.float32"),
    (torch.zeros(4, 2, 3).int(), (1, 3), "[4, 2, 3]"),
    (torch.zeros(4, 2).int(), (1, 3), "[4, 2]"),
    (torch.tensor([[[0, 1]]]), (1,), "layers [3]"),
    (torch.tensor([[[0, 1]] * 3]), (1, 3, 4), "layers [4]"),
    (torch.tensor([[[0, 1]] * 3]), (1, 3, 3), "layers [3]"),
]


@pytest.mark.parametrize(("experts", "layers", "value"), WRONG_FORM)
def test_routes_of_another_form_are_refused(experts, layers, value, messages):
    with pytest.raises(JobFailed) as error:
        ROUTING.build_checked_routes(experts, layers)
    assert value in str(error.value)
    messages(error.value)


def test_every_wrong_value_is_named_with_the_first_place(messages):
    experts = torch.tensor([[[0, 1], [2, 3]], [[4, 4], [6, 8]], [[-1, 0], [1, 0]]])
    with pytest.raises(JobFailed) as caught:
        ROUTING.build_checked_routes(experts, (3, 1))
    unknown, twice = caught.value.violations
    assert "layer 1: [6, 8]" in unknown and "layer 3: [4, 4]" in twice
    messages(caught.value)


def test_everything_wrong_is_said_at_once():
    with pytest.raises(JobFailed) as caught:
        ROUTING.build_checked_routes(torch.zeros(4, 1, 3), (2,), free_mask=torch.zeros(5))
    assert len(caught.value.violations) == 5


def test_experts_that_a_narrow_type_has_cut_off_are_refused(messages):
    routing = Routing((0,), 300, 1)
    with pytest.raises(JobFailed, match=r"uint8.* 300") as error:
        routing.build_checked_routes(torch.zeros(1, 1, 1, dtype=torch.uint8), (0,))
    messages(error.value)
    routes = routing.build_checked_routes(torch.full((1, 1, 1), 299), (0,))
    assert (routes.experts.dtype, routes.experts.item()) == (torch.int16, 299)


def test_routes_of_another_micro_batch_or_model_do_not_fit(messages):
    routes = Routes((1, 2), torch.zeros(4, 2, 2, dtype=torch.int16), torch.zeros(4, dtype=torch.bool))
    misfits = ROUTING.find_misfits(routes, tokens=5)
    layers, shape, free = misfits
    assert "[1, 2]" in layers and "[1, 3]" in layers and "[4]" in free and "[5]" in free
    assert "torch.int16 [4, 2, 2]" in shape and "torch.uint8 [5, 2, 2]" in shape
    for misfit in misfits:
        messages(misfit)
    assert (
        ROUTING.find_misfits(Routes((1, 3), routes.experts.to(torch.uint8), routes.free_mask), tokens=4) == []
    )


def test_sequences_are_taken_apart_and_joined():
    packing = Packing.from_lengths([3, 1, 4], Alignment())
    routes = Routes((1, 3), torch.arange(32, dtype=torch.uint8).view(8, 2, 2))
    first, second, third = routes.split_sequences(packing)
    assert [len(part.experts) for part in (first, second, third)] == [3, 1, 4]
    last_is_free = Routes(third.layers, third.experts, torch.tensor([False] * 3 + [True]))
    again = join_routes([last_is_free, first])
    assert again.free_mask is not None
    assert torch.equal(again.experts, torch.cat((third.experts, first.experts)))
    assert again.free_mask.tolist() == [False] * 3 + [True] + [False] * 3
    assert join_routes([first, second]).free_mask is None
    back, _ = again.split_sequences(Packing.from_lengths([4, 3], Alignment()))
    assert back.free_mask is not None and back.free_mask.tolist() == [False] * 3 + [True]
    with pytest.raises(JobFailed, match="different layers"):
        join_routes([first, Routes((1, 2), second.experts)])
