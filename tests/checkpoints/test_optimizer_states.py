"""Undivided optimizers, FP8 scales, and weights alone go on in any layout, as stretches of a run."""

from typing import Any

import pytest

from tests.checkpoints.test_stretches import EP2, PP2, TP2, far
from tests.checkpoints.world import launch
from tests.world import Core

pytestmark = [pytest.mark.world, pytest.mark.slow]

BF16: dict[str, Any] = {"dtype": "bf16"}
FP8: dict[str, Any] = {**BF16, "fp8": {"scaling": "delayed"}}
SCALES = {
    "fp8 whole": {"parallel": EP2, "steps": 4, "arithmetic": FP8},
    "fp8": {"parallel": EP2, "steps": 2, "save": "fp8", "arithmetic": FP8},
    "fp8 resumed": {"parallel": EP2, "steps": 2, "load": "fp8", "arithmetic": FP8},
    "fp8 as pp2": {"parallel": PP2, "steps": 2, "load": "fp8", "arithmetic": FP8},
    "fp8 as bf16": {
        "parallel": EP2,
        "steps": 1,
        "load": "fp8",
        "save": "bf16",
        "every": 3,
        "arithmetic": BF16,
    },
    "bf16 as fp8": {"parallel": EP2, "steps": 1, "load": "bf16", "arithmetic": FP8},
}
SGD = {"arithmetic": {"dtype": "bf16"}, "optimizer": {"name": "sgd", "lr": 0.1}}
WHOLE = {"optimizer": {"use_distributed_optimizer": False}}
UNDIVIDED: dict[str, dict[str, Any]] = {
    f"{name} {kind}": stretch | options
    for name, options in (("sgd", SGD), ("adam", WHOLE))
    for kind, stretch in (
        ("whole", {"parallel": EP2, "steps": 4}),
        ("saved", {"parallel": EP2, "steps": 2, "save": name}),
        ("resumed", {"parallel": EP2, "steps": 2, "load": name}),
        ("as pp2", {"parallel": PP2, "steps": 2, "load": name}),
        ("as tp2", {"parallel": TP2, "steps": 2, "load": name}),
    )
}

STILL = {"lr": 1e-20, "min_lr": 0.0}  # less than the last digit of any weight
ALONE: dict[str, dict[str, Any]] = {
    f"{dtype} {name}": stretch | {"arithmetic": {"dtype": dtype}}
    for dtype in ("fp32", "bf16")
    for name, stretch in {
        "begun": {"parallel": EP2, "steps": 2, "save": dtype},
        "resumed": {"parallel": EP2, "steps": 2, "load": dtype, "optimizer": STILL},
        "alone": {"parallel": EP2, "steps": 2, "load": dtype, "weights_only": True, "optimizer": STILL},
        "as pp2": {
            "parallel": PP2,
            "steps": 2,
            "load": dtype,
            "weights_only": True,
            "optimizer": STILL | {"name": "sgd"},
        },
        "as tp2": {"parallel": TP2, "steps": 2, "load": dtype, "weights_only": True, "optimizer": STILL},
    }.items()
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, installed: Core) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("stretches")
    plan = SCALES | UNDIVIDED | ALONE
    found: dict[str, Any] = launch("tests.checkpoints.stretches", folder, 2, plan, installed)
    return found


@pytest.mark.parametrize(("name", "loss"), [("sgd", 1e-3), ("adam", 1e-5)])  # bf16, fp32
def test_an_optimizer_that_is_not_divided_goes_on_bit_for_bit_and_in_any_layout(seen, name, loss):
    rest = seen[f"{name} whole"]["losses"][2:]
    assert seen[f"{name} resumed"]["losses"] == rest
    for layout in ("as pp2", "as tp2"):
        found = seen[f"{name} {layout}"]["losses"]
        assert far([step[:-1] for step in found], [step[:-1] for step in rest]) < loss
        assert far(found, rest) < 10 * loss


def test_weights_alone_are_taken_up_by_another_optimizer_in_any_layout(seen):
    """By an optimizer that as good as stands still, every loss is that of the weights that were loaded."""
    for dtype, bound in (("fp32", 1e-5), ("bf16", 1e-3)):
        resumed = [step[:-1] for step in seen[f"{dtype} resumed"]["losses"]]
        assert [step[:-1] for step in seen[f"{dtype} alone"]["losses"]] == resumed
        for layout in ("as pp2", "as tp2"):
            assert far([step[:-1] for step in seen[f"{dtype} {layout}"]["losses"]], resumed) < bound


def test_delayed_scales_go_on_too(seen):
    assert seen["fp8 resumed"]["losses"] == seen["fp8 whole"]["losses"][2:]
    assert far(seen["fp8 as pp2"]["losses"], seen["fp8 whole"]["losses"][2:]) < 0.005
    # With and without FP8 the same weights load; its scales begin anew where there were none.
    assert seen["bf16 as fp8"]["step"] == 3 and len(seen["bf16 as fp8"]["losses"]) == 1
