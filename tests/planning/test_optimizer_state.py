"""What an optimizer keeps in other types than fp32, or on the host: its bytes, and who cannot have it."""

import math
from typing import Any

import pytest

from bundle.environment.hardware import build_preset, detect
from bundle.errors import ExitCode
from bundle.planning import to_json
from tests.environment.machines import recorded
from tests.planning.jobs import QWEN3, job, plan, read_section

AWARE = {"use_precision_aware_optimizer": True}
OFFLOADED = AWARE | {"optimizer_cpu_offload": True}


def states(**optimizer: Any) -> dict[str, int]:
    """Bytes of the only rank."""
    made = plan(job(QWEN3, optimizer=optimizer), build_preset("h200"), per_node=1)
    assert made.problems == ()
    (stage,) = made.memory
    return stage.states._asdict() | {"total": stage.states.device_total}


@pytest.mark.parametrize(
    ("types", "moments"),
    [
        ({}, 8),
        ({"exp_avg_dtype": "bf16"}, 6),
        ({"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, 4),
    ],
)
def test_each_type_is_counted(types, moments):
    plain, typed = states(), states(**AWARE, **types)
    weights = plain["master"] // 4
    assert (typed["master"], typed["moments"]) == (4 * weights, moments * weights)
    assert typed["total"] == plain["total"] - (8 - moments) * weights


@pytest.mark.parametrize("fraction", [1.0, 0.3])
def test_what_is_offloaded_is_on_the_host_with_its_gradient(fraction):
    plain, offloaded = states(), states(**OFFLOADED, optimizer_offload_fraction=fraction)
    there = math.ceil(fraction * plain["master"] / 4)
    assert offloaded["host"] == there * (4 + 8 + 4)
    assert offloaded["total"] == plain["total"] - there * (4 + 8)


def test_a_plan_says_what_is_on_the_host(messages):
    made = plan(job(QWEN3, optimizer=OFFLOADED), build_preset("h200"), per_node=1)
    (stage,) = to_json(made)["stages"]
    assert stage["bytes"]["host"] == made.memory[0].states.host > 0
    shown = read_section(made, "memory")
    assert "host" in shown
    messages(shown)
    assert "host" not in read_section(plan(job(QWEN3), build_preset("h200"), per_node=1), "memory")


def test_a_cpu_refuses_both_by_name(messages):
    made = plan(job(QWEN3, optimizer=OFFLOADED, backend="cpu"), detect("cpu", recorded("cgroup-v1")))
    assert made.exit_code is ExitCode.ENVIRONMENT_UNFIT
    keys = [problem.text.partition(":")[0] for problem in made.problems]
    assert keys == [f"optimizer.{key}" for key in OFFLOADED]
    for problem in made.problems:
        messages(problem.text)
