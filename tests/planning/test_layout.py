"""Placement: groups partition the ranks, and every layer is held once."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bundle.errors import UsageError
from bundle.planning.activations import count_in_flight
from bundle.planning.layout import build_rank_layout
from tests.planning.jobs import DEEPSEEK, QWEN3, job

FIRST, LAST = (f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))
sizes = st.sampled_from([1, 2, 4])


@given(tp=sizes, cp=st.sampled_from([1, 2]), pp=st.sampled_from([1, 2]), ep=sizes, etp=sizes, more=sizes)
def test_groups_of_every_axis_partition_the_ranks(tp, cp, pp, ep, etp, more):
    recipe = job(
        DEEPSEEK,
        parallel={"tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp},
        train={"steps": 1, "global_batch_size": 64},
    )
    world = recipe.parallel.minimal_world * more
    assume(not recipe.find_layout_violations(world))
    layout = build_rank_layout(recipe, world)
    for axis in layout.axes:
        groups = {axis.list_group_ranks(rank) for rank in range(world)}
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert all(
            axis.list_group_ranks(rank)[axis.find_rank_in_group(rank)] == rank for rank in range(world)
        )
    assert tp * cp * pp * layout.find_axis_size("dp") == world
    assert etp * ep * pp * layout.find_axis_size("expert-dp") == world


@pytest.mark.parametrize(("pp", "vpp"), [(1, None), (2, None), (4, None), (2, 2)])
def test_layers_are_dealt_in_rounds(pp, vpp):
    recipe = job(QWEN3, parallel={"pp": pp, "vpp": vpp}, train={"steps": 1, "global_batch_size": 16})
    layout = build_rank_layout(recipe, pp)
    rounds = range(len(layout.stages[0]))
    order = [layer for index in rounds for stage in layout.stages for layer in stage[index].layers]
    assert order == list(range(4))
    held = [chunk for stage in layout.stages for chunk in stage]
    assert [chunk.embedding for chunk in held].count(True) == 1
    assert [chunk.head for chunk in held].count(True) == 1
    assert layout.stages[0][0].embedding
    assert layout.stages[-1][-1].head


@pytest.mark.parametrize(
    ("layers", "parallel", "dealt"),
    [
        (5, {"pp": 2, FIRST: 3}, [["012"], ["34"]]),
        (7, {"pp": 3, FIRST: 1, LAST: 2}, [["0"], ["1234"], ["56"]]),
        (8, {"pp": 3, "vpp": 2, FIRST: 4}, [["01", "45"], ["2", "6"], ["3", "7"]]),
    ],
)
def test_first_and_last_stage_have_the_layers_that_they_are_given(layers, parallel, dealt):
    recipe = job(
        QWEN3 | {"num_hidden_layers": layers},
        parallel=parallel,
        train={"steps": 1, "global_batch_size": 12},
    )
    stages = build_rank_layout(recipe, parallel["pp"]).stages
    assert [["".join(map(str, chunk.layers)) for chunk in stage] for stage in stages] == dealt


@pytest.mark.parametrize(
    ("layout", "pp", "dealt"),
    [
        ("Et*3|tmL", 2, [["E012"], ["3nmL"]]),
        ("E|tt|t|tmL", 2, [["E", "2"], ["01", "3nmL"]]),
        ("Ett|t|t|mL", 2, [["E01", "3n"], ["2", "mL"]]),
        ("Ett|tt|m|L", 4, [["E01"], ["23n"], ["m"], ["L"]]),
    ],
)
def test_a_layout_string_says_what_every_chunk_holds(layout, pp, dealt):
    """Above: numbers of layers, n the norm behind them, which MTP layers read."""
    sizes = {"pp": pp, "pipeline_model_parallel_layout": layout}
    recipe = job(DEEPSEEK, parallel=sizes, train={"steps": 1, "global_batch_size": 12})
    stages = build_rank_layout(recipe, pp).stages
    said = [
        [
            f"{'E' * chunk.embedding}{''.join(map(str, chunk.layers))}{'n' * chunk.final_norm}"
            f"{'m' * chunk.mtp_layers}{'L' * chunk.head}"
            for chunk in stage
        ]
        for stage in stages
    ]
    assert said == dealt
    assert [chunk.losses for stage in stages for chunk in stage if chunk.head] == [2]
    assert all(chunk.has_mtp_embedding_copy == bool(chunk.mtp_layers) for stage in stages for chunk in stage)
    assert recipe.parallel.mtp_rank == next(rank for rank, stage in enumerate(dealt) if "m" in "".join(stage))


def test_the_head_and_mtp_stand_together_with_a_copy_of_the_embedding():
    recipe = job(DEEPSEEK, parallel={"pp": 2, "vpp": 2}, train={"steps": 1, "global_batch_size": 16})
    last = build_rank_layout(recipe, 2).stages[1][1]
    assert (last.head, last.mtp_layers, last.has_mtp_embedding_copy) == (True, 1, True)
    assert not build_rank_layout(job(DEEPSEEK), 1).stages[0][0].has_mtp_embedding_copy


def test_ranks_that_do_not_fit_are_refused(messages):
    with pytest.raises(UsageError, match="3 ranks") as error:
        build_rank_layout(job(QWEN3, parallel={"tp": 2}), 3)
    messages(error.value)


@pytest.mark.parametrize(
    ("stages", "stage", "chunks", "microbatches", "expected"),
    [
        (1, 0, 1, 8, (1,)),
        (4, 0, 1, 8, (4,)),
        (4, 3, 1, 8, (1,)),
        (4, 0, 1, 2, (2,)),
        (2, 0, 2, 4, (3, 2)),
        (2, 1, 2, 4, (2, 1)),
        (2, 0, 2, 2, (2, 2)),
    ],
)
def test_micro_batches_in_flight(stages, stage, chunks, microbatches, expected):
    assert count_in_flight(stages, stage, chunks, microbatches) == expected
