"""The jobs for published models: by their plan they run on the machines that they name."""

import math
import re

import pytest

from bundle.architectures.tensors import TOWER_PREFIX, Tensors
from bundle.environment.hardware import build_preset
from bundle.planning import Plan, build_plan
from bundle.recipe import Recipe, list_built_in, load

READY = [name for name in list_built_in() if name.endswith(("-h200", "-a3"))]
# Billions of parameters where the name does not say them.
SIZES = {
    "deepseek-v2-lite": 15.7,
    "deepseek-v2": 236,
    "deepseek-v3": 671,
    "kimi-k2": 1026,
    "glm-4.5-air": 106,
    "mixtral-8x7b": 46.7,
}
# Billions of active ones where the name counts neither embedding nor head.
ACTIVE = {"qwen3-next-80b-a3b": 3.9}
# What NPUs do not compute, as `plan` says it.
NOT_ON_NPUS = {"gpt-oss-20b": "sinks", "gpt-oss-120b": "sinks", "qwen3-next-80b-a3b": "gated delta nets"}


def planned(name: str) -> Plan:
    return build_plan(load(name), hardware_name=name.rpartition("-")[2], mcore="0.16.1")


def lengths(recipe: Recipe) -> tuple[int, ...]:
    stages = (
        recipe.parallel.compute_stages(recipe.architecture.num_layers, recipe.architecture.mtp_layers) or ()
    )
    return tuple(sum(chunk.layers for chunk in stage) for stage in stages)


@pytest.mark.parametrize("name", READY)
def test_a_ready_job_is_planned_without_a_problem(name: str) -> None:
    plan, machine = planned(name), build_preset(name.rpartition("-")[2])
    assert plan.recipe.name == name
    assert not plan.problems
    devices = plan.recipe.devices
    assert plan.world == devices.nodes * (devices.per_node or len(machine.devices))
    assert sum(lengths(plan.recipe)) == plan.recipe.architecture.num_layers
    # A tenth is left to what a plan does not count: kernels' workspaces, fragments.
    assert (
        0 < max(stage.peak_bytes for stage in plan.memory) < 0.9 * (machine.smallest_device_memory.value or 0)
    )
    assert plan.layout and plan.layout.bubble < 0.25


@pytest.mark.parametrize("name", READY)
def test_its_model_has_the_published_size(name: str) -> None:
    model, size = name.partition("-")[2].rpartition("-")[0], planned(name).size
    total, active = (re.search(pattern, model) for pattern in (r"-(\d+)b\b", r"-a(\d+)b$"))
    said = SIZES.get(model) or float(total[1] if total else 0)
    table = Tensors(load(name).architecture)
    tower = sum(math.prod(of.shape) for of in table if of.name.startswith(TOWER_PREFIX))  # no name counts one
    assert (size.parameters - tower) / 1e9 == pytest.approx(said, rel=0.1)
    if active:
        published = ACTIVE.get(model, float(active[1]))
        assert (size.active_parameters - tower) / 1e9 == pytest.approx(published, rel=0.15)
    assert bool(tower) == ("-vl-" in name)


def test_a_model_with_a_tower_has_as_many_parameters_as_its_published_files() -> None:
    # Qwen3-VL-8B-Instruct, whose safetensors have 750 tensors.
    assert planned("sft-qwen3-vl-8b-h200").size.parameters == 8_767_123_696


@pytest.mark.parametrize("machine", ["h200", "a3"])
def test_kimi_k2_turns_as_its_config_says(machine: str) -> None:
    # Unlike DeepSeek-V3, whose beta_fast is 32.
    kimi, deepseek = (load(f"sft-{name}-{machine}").architecture for name in ("kimi-k2", "deepseek-v3"))
    turned = [of.rope_scaling and of.rope_scaling.beta_fast for of in (kimi, deepseek)]
    assert turned == [1.0, 32.0]


@pytest.mark.parametrize("machine", ["h200", "a3"])
@pytest.mark.parametrize("model", ["kimi-k2", "moonlight-16b-a3b", "deepseek-v2", "deepseek-v2-lite"])
def test_experts_are_balanced_as_their_configs_say(model: str, machine: str) -> None:
    moe = load(f"sft-{model}-{machine}").architecture.moe
    assert moe and (moe.aux_loss_coeff, moe.aux_loss_per_sequence) == (0.001, True)


def test_every_model_is_ready_for_both_machines_but_where_npus_refuse_it() -> None:
    models = {name[4:].rpartition("-")[0] for name in READY if name.startswith("sft-")}
    absent = {model for model in models if not {f"sft-{model}-h200", f"sft-{model}-a3"} <= set(READY)}
    assert absent == set(NOT_ON_NPUS)
    for model, lacking in NOT_ON_NPUS.items():
        on_npus = load(f"sft-{model}-h200", ["backend=ascend", "devices.per_node=16"])
        problems = build_plan(on_npus, hardware_name="a3", mcore="0.16.1").problems
        assert any(lacking in problem.text for problem in problems), model


def test_the_depths_that_stages_do_not_divide_are_among_them() -> None:
    recipes = [load(name) for name in READY]
    uneven = {recipe.architecture.num_layers for recipe in recipes if len(set(lengths(recipe))) > 1}
    assert uneven >= {27, 46, 61, 94}


def test_dense_layers_are_computed_twice_only_where_memory_asks_for_it() -> None:
    """Where 0.7 of a device would not do without. How many tokens experts get, no plan knows."""
    dense = [name for name in READY if load(name).architecture.moe is None]
    for name in (name for name in dense if load(name).model.recompute is not None):
        machine = name.rpartition("-")[2]
        without = build_plan(load(name, ["model.recompute=null"]), hardware_name=machine, mcore="0.16.1")
        fullest = max(stage.peak_bytes for stage in without.memory)
        assert fullest > 0.7 * (build_preset(machine).smallest_device_memory.value or 0), name
