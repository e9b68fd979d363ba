"""Layout strings against megatron-core's own parser, which decides what they mean.

python -m tests.recipe.dealing   raises what differs; hypothesis makes the strings.
"""

import json
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.transformer import pipeline_parallel_layer_layout as theirs
from megatron.core.transformer.enums import LayerType
from packaging.version import Version

from bundle.environment.packages import MegatronCode
from bundle.planning.layout import build_rank_layout
from bundle.planning.problems import MTP_LAYOUT_SOURCE_PREDICATE, STANDALONE_MTP_SOURCE_PREDICATE
from bundle.recipe import stages
from tests.planning.jobs import DEEPSEEK, job

LETTERS = {
    LayerType.embedding: "E",
    LayerType.loss: "L",
    LayerType.decoder: "t",
    LayerType.mtp: "m",
}
DEPTHS = (0, 1, 2)
COMMAS = st.sampled_from(["", "", ","])


def factor(least: int = 0) -> st.SearchStrategy[str]:
    return st.integers(least, 5).map(lambda n: f"*{n}")


ONE = st.builds(str.__add__, st.sampled_from("EtmL|"), st.just("") | factor())
GROUP = st.builds("({}{}){}".format, COMMAS, st.lists(ONE, min_size=1, max_size=4).map("".join), factor())
WRITTEN = st.lists(st.builds(str.__add__, ONE | GROUP, COMMAS), min_size=1, max_size=8).map("".join)
ANYTHING = st.text("EtmL|*(),0123 4x", max_size=14)


def read_by_megatron(layout: str) -> tuple[str, ...]:
    found = theirs.PipelineParallelLayerLayout.parse_str_to_list(layout)
    return tuple("".join(LETTERS[letter] for letter in stage) for stage in found)


@given(WRITTEN)
@settings(max_examples=300, deadline=None)
def every_layout_is_read_as_megatron_reads_it(layout: str) -> None:
    assert stages.parse_layout(layout) == read_by_megatron(layout)


@given(ANYTHING)
@settings(max_examples=1000, deadline=None)
def nothing_is_read_otherwise(layout: str) -> None:
    try:
        ours = stages.parse_layout(layout)
    except ValueError:
        return
    assert ours == read_by_megatron(layout)


def takes(layout: str, pp: int, layers: int, depth: int) -> theirs.PipelineParallelLayerLayout | None:
    """Megatron's own layout; None where it refuses it."""
    try:
        made = theirs.PipelineParallelLayerLayout(layout, pp)
        told = {"mtp_num_layers": depth or None} if CODE.has(MTP_LAYOUT_SOURCE_PREDICATE) else {}
        made.validate_layer_layout(num_layers=layers, **told)
    except (AssertionError, NotImplementedError):
        return None
    return made


@st.composite
def shared(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """(layout, pp, layers, MTP layers) of a model; in some of them something is at another place."""
    pp, rounds, depth = draw(st.integers(2, 4)), draw(st.integers(1, 3)), draw(st.sampled_from(DEPTHS))
    layers = draw(st.integers(1, 8))
    letters = "E" + "t" * layers + "m" * depth + "L"
    if draw(st.integers(0, 3)) == 0:
        letters = "".join(draw(st.permutations(letters)))
    size = pp * rounds - (draw(st.integers(0, 9)) == 0)
    cuts = sorted(draw(st.lists(st.integers(0, len(letters)), min_size=size - 1, max_size=size - 1)))
    starts, ends = [0, *cuts], [*cuts, len(letters)]
    layout = "|".join(letters[a:b] for a, b in zip(starts, ends, strict=True))
    return layout, pp, layers + (draw(st.integers(0, 9)) == 0), depth


SEEN: set[str] = set()


@given(shared())
@settings(max_examples=1000, deadline=None)
def what_we_take_megatron_deals_out_alike(drawn: tuple[str, int, int, int]) -> None:
    layout, pp, layers, depth = drawn
    held = stages.parse_layout(layout)
    refused = list(stages.find_stage_violations(held, pp, layers=layers, mtp_layers=depth))
    last = {"t", "m"} <= set(held[-1])
    if depth and not (
        CODE.has(MTP_LAYOUT_SOURCE_PREDICATE) and (last or CODE.has(STANDALONE_MTP_SOURCE_PREDICATE))
    ):
        return  # this release does not build it
    made = takes(layout, pp, layers, depth)
    if refused:
        # Megatron takes these, and fails or trains wrongly later.
        known = ("is empty", "must occur once, as the", "not on the first pipeline rank")
        assert made is None or all(any(word in why for word in known) for why in refused), (layout, refused)
        SEEN.add("refused")
        return
    assert made is not None, layout
    rounds = len(held) // pp
    sizes = {"pp": pp, "pipeline_model_parallel_layout": layout}
    config = DEEPSEEK | {"num_hidden_layers": layers, "first_k_dense_replace": 0}
    model = {"config": config, "mtp": {"layers": depth}}
    recipe = job(config, parallel=sizes, model=model, train={"steps": 1, "global_batch_size": 24})
    assert recipe.parallel.vpp == (rounds if rounds > 1 else None)
    dealt = build_rank_layout(recipe, pp)
    for rank, chunk in product(range(pp), range(rounds)):
        parallel_state.set_pipeline_model_parallel_rank(rank)
        parallel_state.set_virtual_pipeline_model_parallel_world_size(rounds if rounds > 1 else None)
        ours, at = dealt.stages[rank][chunk], {"vp_stage": chunk}
        assert list(ours.layers) == made.get_layer_id_list(LayerType.decoder, **at), layout
        assert ours.mtp_layers == made.get_num_layers_to_build(LayerType.mtp, **at), layout
        assert ours.embedding == bool(made.get_num_layers_to_build(LayerType.embedding, **at)), layout
        assert ours.head == bool(made.get_num_layers_to_build(LayerType.loss, **at)), layout
        if depth and ours.mtp_layers:
            assert recipe.parallel.mtp_rank == rank, layout
    SEEN.add(f"taken with {depth} MTP layers")


if __name__ == "__main__":
    import megatron.core

    CODE = MegatronCode(Version(megatron.core.__version__))
    every_layout_is_read_as_megatron_reads_it()
    nothing_is_read_otherwise()
    what_we_take_megatron_deals_out_alike()
    print(json.dumps(sorted(SEEN)))
