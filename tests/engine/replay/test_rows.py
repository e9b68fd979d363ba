"""Routes reach the row of their token on every rank and come back, whatever the layout."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bundle.engine.routes import Routes, Routing, build_forced_routes_with_padding, from_router_rows
from bundle.mcore.context import RouterChoices
from bundle.packing.packing import Packing
from bundle.recipe.alignment import Alignment
from tests.packing.strategies import ALIGNMENTS, LENGTHS

LAYERS = (1, 2, 5)


@st.composite
def routings(draw):
    experts = draw(st.sampled_from((4, 9, 256, 300)))
    return Routing(LAYERS, experts, draw(st.sampled_from((1, 2, 4))))


def ranks(lengths, alignment):
    """For each rank that holds different rows: its packing, and its part under sequence parallelism."""
    parts = alignment.tp if alignment.sequence_parallel else 1
    packings = [Packing.from_lengths(lengths, alignment, rank=rank) for rank in range(alignment.cp)]
    return [[(packing, part, parts) for part in range(parts)] for packing in packings]


def drawn(routing, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(routing.experts, (tokens, len(routing.layers), 1), generator=generator)
    experts = (first + torch.arange(routing.topk)) % routing.experts
    return Routes(routing.layers, experts.to(routing.dtype))


def gathered(grid, of):
    """[cp, tp, t, ...] from a function of each rank."""
    return torch.stack([torch.stack([of(*rank) for rank in row]) for row in grid])


@settings(max_examples=50)
@given(LENGTHS, ALIGNMENTS, routings(), st.integers(0, 99))
def test_what_routers_are_given_comes_back_as_the_routes(lengths, alignment, routing, seed):
    routes = drawn(routing, sum(lengths), seed)
    grid = ranks(lengths, alignment)

    def given_to(packing, part, parts):
        found = build_forced_routes_with_padding(routes, packing, routing, LAYERS, part=part, parts=parts)
        assert found is not None and found.row_mask is None
        experts = torch.stack([found.experts[layer] for layer in LAYERS], dim=1)
        # megatron embeds [b, s / cp], swaps both dimensions and cuts the first among the tensor ranks
        tokens = (
            packing.pack_concatenated_tokens(torch.arange(sum(lengths)), fill=-1)
            .t()
            .chunk(parts)[part]
            .reshape(-1)
        )
        assert torch.equal(experts[tokens >= 0], routes.experts[tokens[tokens >= 0]])
        return experts

    seen = gathered(grid, given_to)
    assert seen.dtype == routing.dtype
    assert torch.equal(from_router_rows(seen, grid[0][0][0]), routes.experts)
    # padding, too, goes to k different experts
    if routing.topk > 1:
        assert (seen.sort(-1).values.diff() != 0).all()


@settings(max_examples=50)
@given(LENGTHS, ALIGNMENTS, routings(), st.integers(0, 99))
def test_recording_forces_padding_only_and_spreads_it(lengths, alignment, routing, seed):
    for row in ranks(lengths, alignment):
        valid = row[0][0].valid.transpose(0, 1).flatten()
        given = [
            build_forced_routes_with_padding(None, p, routing, LAYERS, part=part, parts=parts)
            for p, part, parts in row
        ]
        found = [one for one in given if one is not None]
        if not found:
            assert valid.all()
            continue
        rows = torch.cat([one.row_mask for one in found if one.row_mask is not None])
        assert torch.equal(rows, ~valid)
        load = torch.zeros(routing.experts)
        experts = torch.cat([one.experts[LAYERS[0]] for one in found])[rows].long().flatten()
        load.index_add_(0, experts, torch.ones(len(experts)))
        assert load.max() - load.min() <= 1
        assert all(torch.equal(one.experts[LAYERS[0]], one.experts[LAYERS[2]]) for one in found)


@settings(max_examples=50)
@given(LENGTHS, ALIGNMENTS, st.data())
def test_free_tokens_are_left_to_the_router_and_nothing_else(lengths, alignment, data):
    routing = Routing(LAYERS, 16, 2)
    tokens = sum(lengths)
    seed = data.draw(st.integers(0, 99))
    free = torch.rand(tokens, generator=torch.Generator().manual_seed(seed)) < 0.3
    routes = Routes(LAYERS, drawn(routing, tokens, seed).experts, free)
    grid = ranks(lengths, alignment)

    def rows_of(packing, part, parts):
        found = build_forced_routes_with_padding(routes, packing, routing, (2,), part=part, parts=parts)
        assert found is not None
        return found.row_mask

    rows = gathered(grid, rows_of)
    assert torch.equal(from_router_rows(rows, grid[0][0][0]), ~free)
    assert int((~rows).sum()) == int(free.sum())


def test_a_chunk_gets_the_routes_of_its_own_layers():
    routing = Routing(LAYERS, 16, 2)
    routes = drawn(routing, 8, 3)
    packing = Packing.from_lengths([5, 3], Alignment())
    found = build_forced_routes_with_padding(routes, packing, routing, (5, 1), part=0, parts=1)
    assert found is not None
    assert list(found.experts) == [5, 1]
    assert torch.equal(found.experts[5], routes.experts[:, 2])
    assert torch.equal(found.experts[1], routes.experts[:, 0])
    assert build_forced_routes_with_padding(routes, packing, routing, (), part=0, parts=1) is None


def test_nothing_is_read_back_from_the_device():
    """Tensors of the meta device have no values: whatever asked for one would fail."""
    routing = Routing(LAYERS, 16, 2)
    packing = Packing.from_lengths([5, 3], Alignment(scaling="blockwise"), device="meta")
    free = torch.zeros(8, dtype=torch.bool)
    own = torch.empty(16, 2, dtype=torch.int64, device="meta")
    routers = {torch.nn.Identity(): layer for layer in LAYERS}
    choices = RouterChoices(routers, routing.dtype, has_backward=True)
    for routes in (None, drawn(routing, 8, 0), Routes(LAYERS, drawn(routing, 8, 0).experts, free)):
        given = build_forced_routes_with_padding(routes, packing, routing, LAYERS, part=0, parts=1)
        with choices.record_forward(given) as made, torch.no_grad():
            for router in routers:
                assert choices.choose(router, own).shape == own.shape
        seen = torch.stack(list(made.values()), 1)[None, None]
        assert from_router_rows(seen, packing).shape == (8, 3, 2)
