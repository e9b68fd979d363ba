"""The SFT jobs for published models: by their plan they run on the machines that they name."""

import re

import pytest

from bundle.environment.hardware import preset
from bundle.planning import Plan, plan_for
from bundle.recipe import Recipe, built_in, load

READY = [name for name in built_in() if name.startswith("sft-")]
# Billions of parameters where the name does not say them.
SIZES = {
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671,
    "kimi-k2": 1026,
    "glm-4.5-air": 106,
    "mixtral-8x7b": 46.7,
}


def planned(name: str) -> Plan:
    return plan_for(load(name), named=name.rpartition("-")[2], mcore="0.16.1")


def lengths(recipe: Recipe) -> tuple[int, ...]:
    return recipe.parallel.layers_of_stages(recipe.architecture.num_layers) or ()


@pytest.mark.parametrize("name", READY)
def test_a_ready_job_is_planned_without_a_problem(name: str) -> None:
    plan, machine = planned(name), preset(name.rpartition("-")[2])
    assert plan.recipe.name == name
    assert not plan.problems
    assert plan.world == plan.recipe.devices.nodes * len(machine.devices)
    assert sum(lengths(plan.recipe)) == plan.recipe.architecture.num_layers
    # A tenth is left to what a plan does not count: kernels' workspaces, fragments.
    assert 0 < max(stage.total for stage in plan.memory) < 0.9 * (machine.device_memory.value or 0)


@pytest.mark.parametrize("name", READY)
def test_its_model_has_the_published_size(name: str) -> None:
    model, size = name.removeprefix("sft-").rpartition("-")[0], planned(name).size
    total, active = (re.search(pattern, model) for pattern in (r"-(\d+)b\b", r"-a(\d+)b$"))
    said = SIZES.get(model) or float(total[1] if total else 0)
    assert size.parameters / 1e9 == pytest.approx(said, rel=0.1)
    if active:
        assert size.active / 1e9 == pytest.approx(float(active[1]), rel=0.15)


def test_the_depths_that_stages_do_not_divide_are_among_them() -> None:
    recipes = [load(name) for name in READY]
    uneven = {recipe.architecture.num_layers for recipe in recipes if len(set(lengths(recipe))) > 1}
    assert uneven >= {27, 46, 61, 94}
