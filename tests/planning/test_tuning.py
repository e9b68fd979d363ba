"""The search for a layout: what it chooses runs by the plan, is the fastest, and is found in time."""

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest

from bundle.environment.hardware import build_preset
from bundle.environment.machine import Hardware
from bundle.errors import EnvironmentUnfit, UsageError
from bundle.planning import Plan, build_plan
from bundle.planning.layout import build_rank_layout
from bundle.planning.tuning import (
    RECOMPUTE_HALF,
    Search,
    _fit_stages_to_layers,
    _MemoryFailure,
    describe_layout,
    list_tuned_overrides,
    search_candidates,
)
from bundle.recipe import Parallel, Recipe, from_mapping, list_built_in, load
from tests.planning.jobs import DEEPSEEK, QWEN3, job, with_memory
from tests.planning.jobs import plan as plan_on

READY = [name for name in list_built_in() if name.endswith(("-h200", "-a3"))]
QUICK = [
    ("sft-qwen3-8b-h200", 8), ("sft-qwen3-8b-h200", 1024), ("sft-deepseek-v3-h200", 8),
    ("sft-deepseek-v3-h200", 256), ("sft-gpt-oss-20b-h200", 16),
    ("grpo-qwen3-8b-h200", 64),
]  # fmt: skip
WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024)
MOST_SECONDS = 5
H200 = build_preset("h200")


def plan_for(world: int, recipe: Recipe) -> Plan:
    return build_plan(recipe, hardware_name="h200", mcore="0.16.1", nodes=world // 8, per_node=8)


def check_ready(name: str, world: int) -> None:
    """A layout is chosen in time that a plan of the changed recipe accepts; or memory is too small by far."""
    recipe, started = load(name), time.process_time()
    search = search_candidates(plan_for(world, recipe), lambda changed: plan_for(world, changed), 10)
    assert time.process_time() - started < MOST_SECONDS
    if not search.candidates:
        # Weights in bf16 and gradients in fp32, with everything else on the host.
        assert 6 * plan_for(world, recipe).size.parameters > world * (H200.smallest_device_memory.value or 0)
        with pytest.raises(EnvironmentUnfit, match="too much"):
            search.raise_without_candidates(plan_for(world, recipe))
        return
    search.raise_without_candidates(plan_for(world, recipe))
    most = 0.9 * (H200.smallest_device_memory.value or 0)
    free = [float(f"{of.time.total:.3g}") for of in search.candidates if of.plan.fullest_rank_bytes <= most]
    assert free == sorted(free)
    best = search.candidates[0].plan.recipe
    again = load(name, list_tuned_overrides(recipe, best))
    assert again.with_unchecked_sections() == best
    accepted = plan_for(world, again)
    assert not accepted.problems and accepted.world == world
    assert accepted.fullest_rank_bytes <= most or not free


@pytest.mark.parametrize(("name", "world"), QUICK)
def test_a_ready_recipe_is_tuned_in_time(name: str, world: int):
    check_ready(name, world)


@pytest.mark.slow
@pytest.mark.parametrize("name", READY)
def test_every_ready_recipe_is_tuned_in_time_on_8_to_1024_devices(name: str):
    for world in WORLDS:
        check_ready(name, world)


def search_on(recipe: Recipe, hardware: Hardware, per_node: int = 8, most: int = 10) -> tuple[Plan, Search]:
    base = plan_on(recipe, hardware, per_node=per_node)
    return base, search_candidates(base, lambda changed: plan_on(changed, hardware, per_node=per_node), most)


def list_by_force(recipe: Recipe, world: int) -> Iterator[Recipe]:
    """Every recipe that its whole validation accepts, with the keys that a search sets."""
    sizes = [size for size in range(1, 9) if world % size == 0]
    counts = range(1, recipe.train.global_batch_size + 1)
    savings: tuple[tuple[dict[str, Any] | None, bool], ...] = (
        (None, False),
        ({"granularity": "full", "method": "block", "layers": 0}, False),
        ({"granularity": "full"}, False),
        ({"granularity": "full"}, True),
    )
    for tp, pp, vpp, cp, ep, size, (recompute, offload) in itertools.product(
        sizes, sizes, (None, 2, 4), sizes, sizes, counts, savings
    ):
        layers = {"layers": -(-recipe.architecture.num_layers // pp // 2)} if recompute else {}
        block = recompute and (recompute | layers if "method" in recompute else recompute)
        for etp in {1, tp}:
            parallel = {"tp": tp, "pp": pp, "vpp": vpp, "cp": cp, "ep": ep, "etp": etp}
            values = recipe.dump() | {"parallel": parallel, "devices": {"nodes": 1, "per_node": world}}
            values["model"] = values["model"] | {"recompute": block}
            values["train"] = values["train"] | {"micro_batch_size": size}
            values["optimizer"] = values["optimizer"] | {
                "use_precision_aware_optimizer": offload,
                "optimizer_cpu_offload": offload,
            }
            try:
                yield from_mapping(values)
            except UsageError:
                continue


# Its weights are most of its memory, and only pipeline stages divide them.
ONE_HEAD = QWEN3 | {
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "hidden_size": 512,
    "intermediate_size": 2048,
}


@pytest.mark.parametrize(
    ("config", "share"),
    [
        pytest.param(QWEN3, 1000, id="free"),
        pytest.param(QWEN3, 0.7, id="dense"),
        pytest.param(DEEPSEEK, 0.8, id="experts"),
        pytest.param(ONE_HEAD, 0.6, id="stages alone"),
    ],
)
def test_the_best_candidate_is_the_best_of_all(config, share: float):
    """Against a list without order and without shortcuts; `share`: of the memory that the fastest needs."""
    recipe = job(config, train={"steps": 10, "global_batch_size": 2}, data=ROWS)
    _, free = search_on(recipe, H200, per_node=4)
    gib = share * free.candidates[0].plan.fullest_rank_bytes / 2**30
    hardware = with_memory(H200, gib)
    base, search = search_on(recipe, hardware, per_node=4)
    assert (share < 1) == (search.candidates[0].plan.recipe != free.candidates[0].plan.recipe)
    fastest = float("inf")
    for other in list_by_force(recipe, 4):
        planned = plan_on(other, hardware, per_node=4)
        if not planned.problems and planned.fullest_rank_bytes <= 0.9 * gib * 2**30:
            fastest = min(fastest, base.roofline.predict(other, build_rank_layout(other, 4)).total)
    assert search.candidates[0].time.total == pytest.approx(fastest, rel=0.01)


ROWS = {"source": "text", "path": ["stdlib"], "sequence_length": 64}


def test_a_small_memory_asks_for_recomputation_and_then_for_the_host():
    recipe, chosen, gib = job(QWEN3, train={"steps": 10, "global_batch_size": 1}, data=ROWS), [], 100.0
    for _ in range(4):  # each memory is a little too small for the choice before
        _, search = search_on(recipe, with_memory(H200, gib), per_node=1)
        best, gib = (
            search.candidates[0].plan.recipe,
            search.candidates[0].plan.fullest_rank_bytes / 2**30 / 0.91,
        )
        recompute, optimizer = best.model.recompute, best.optimizer
        chosen.append((recompute and recompute.method, optimizer.optimizer_cpu_offload))
        assert optimizer.use_precision_aware_optimizer is optimizer.optimizer_cpu_offload
    assert chosen == [(None, False), ("block", False), ("uniform", False), ("uniform", True)]


def test_a_tight_layout_is_chosen_where_no_other_fits():
    recipe = job(QWEN3, train={"steps": 10, "global_batch_size": 1}, data=ROWS)
    _, search = search_on(recipe, with_memory(H200, 100), per_node=1)
    least = min(of.plan.fullest_rank_bytes for of in _search_all(recipe).candidates) / 2**30
    _, search = search_on(recipe, with_memory(H200, least * 1.05), per_node=1)
    (candidate,) = search.candidates
    assert candidate.plan.fullest_rank_bytes / 2**30 == pytest.approx(least)
    assert any("memory is tight" in note for note in candidate.plan.notes)


def _search_all(recipe: Recipe) -> Search:
    """The least memory: all that is found before a device is full."""
    for gib in (0.001 * 1.1**step for step in range(80)):
        _, search = search_on(recipe, with_memory(H200, gib), per_node=1)
        if search.candidates:
            return search
    raise AssertionError("nothing fits")


def test_a_recipe_without_a_fitting_layout_is_refused_with_the_nearest(messages):
    recipe = job(DEEPSEEK, train={"steps": 10, "global_batch_size": 8}, data=ROWS)
    base, search = search_on(recipe, with_memory(H200, 0.001), per_node=2)
    with pytest.raises(EnvironmentUnfit) as refusal:
        search.raise_without_candidates(base)
    assert "optimizer on the host" in str(refusal.value) and refusal.value.violations
    messages(refusal.value)


def test_a_recipe_without_an_allowed_layout_is_refused_with_its_violations(messages):
    recipe = job(QWEN3, train={"steps": 10, "global_batch_size": 1}, data=ROWS)
    base, search = search_on(recipe, H200, per_node=7)
    with pytest.raises(UsageError, match=r"train\.global_batch_size") as refusal:
        search.raise_without_candidates(base)
    messages(refusal.value)


@pytest.mark.parametrize(
    ("hardware", "per_node", "error"), [("h200", 9, EnvironmentUnfit), ("cpu", 5000, UsageError)]
)
def test_a_wrong_number_of_devices_is_refused_before_any_layout_is_planned(hardware, per_node, error):
    recipe = job(QWEN3, train={"steps": 10, "global_batch_size": 8}, data=ROWS)
    base = build_plan(recipe, hardware_name=hardware, mcore="0.16.1", nodes=1, per_node=per_node)
    with pytest.raises(error) as refusal:
        search_candidates(base, lambda _: pytest.fail("planned"), 10)
    (violation,) = refusal.value.violations
    assert violation.startswith("devices.per_node: ")


def test_the_uneven_stages_of_a_prime_number_of_layers_are_tried():
    recipe = job(QWEN3 | {"num_hidden_layers": 7}, train={"steps": 10, "global_batch_size": 2}, data=ROWS)
    _, search = search_on(recipe, H200, per_node=8, most=100)
    ends = {
        (p.pp, p.num_layers_in_first_pipeline_stage, p.num_layers_in_last_pipeline_stage)
        for p in (of.plan.recipe.parallel for of in search.candidates)
    }
    assert {(2, 4, 3), (4, 2, 1)} <= ends


def test_interleaved_uneven_stages_have_whole_chunks():
    layouts = list(_fit_stages_to_layers(Parallel(pp=2, vpp=2), 10))
    ends = [(p.num_layers_in_first_pipeline_stage, p.num_layers_in_last_pipeline_stage) for p in layouts]
    assert ends == [(6, 4)]


def test_a_failure_says_nothing_of_a_layout_that_divides_more():
    """Activations lacked memory in `failed`; each other one divides or keeps less, or stages differ."""
    failed = job(DEEPSEEK, parallel={"tp": 2, "pp": 2, "ep": 2, "etp": 1})
    failure = _MemoryFailure(failed, RECOMPUTE_HALF, lacks_states=False)
    assert failure.covers(failed, RECOMPUTE_HALF) and failure.covers(failed, RECOMPUTE_HALF - 1)
    assert not failure.covers(failed, RECOMPUTE_HALF + 1)
    for changes in ({"tp": 4}, {"cp": 2}, {"ep": 4}, {"pp": 4}, {"vpp": 2}):
        parallel = failed.parallel.model_copy(update=changes)
        assert not failure.covers(failed.with_unchecked_sections(parallel=parallel), RECOMPUTE_HALF), changes


def test_words_for_a_layout():
    values = {"parallel": {"tp": 4, "pp": 2, "vpp": 2, "ep": 2, "etp": 1}}
    recipe = job(DEEPSEEK, **values, model={"config": DEEPSEEK, "recompute": {"granularity": "full"}})
    words = "tp 4, pp 2, ep 2, etp 1, 2 chunks a stage, micro-batch 1, recompute all layers"
    assert describe_layout(recipe) == words
    assert list_tuned_overrides(recipe, recipe) == []
