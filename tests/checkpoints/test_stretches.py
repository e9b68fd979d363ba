import math
from pathlib import Path
from typing import Any

import pytest

from bundle.environment import packages
from tests.checkpoints.world import launch
from tests.world import Core

pytestmark = pytest.mark.world

EP2: dict[str, Any] = {"ep": 2}
PP2: dict[str, Any] = {"pp": 2}
UNEVEN: dict[str, Any] = {"pp": 2, "num_layers_in_last_pipeline_stage": 1}
VPP2: dict[str, Any] = {"pp": 2, "vpp": 2}
LAID_OUT, OTHERWISE = (
    {"pp": 2, "pipeline_model_parallel_layout": f"E{x}L"} for x in ("|tt|t|tm", "t|t|t|tm")
)
TP2: dict[str, Any] = {"tp": 2, "ep": 2, "etp": 1}
CP2: dict[str, Any] = {"cp": 2}

PLAN = {
    "whole": {"parallel": EP2, "steps": 4},
    "ep2": {"parallel": EP2, "steps": 2, "save": "ep2"},
    "ep2 resumed": {"parallel": EP2, "steps": 2, "load": "ep2"},
    "ep2 as uneven pp2": {"parallel": UNEVEN, "steps": 2, "load": "ep2"},
    "ep2 as cp2": {"parallel": CP2, "steps": 2, "load": "ep2"},
    "tp2": {"parallel": TP2, "steps": 2, "save": "tp2"},
    "tp2 resumed": {"parallel": TP2, "steps": 2, "load": "tp2"},
    "tp2 as pp2 vpp2": {"parallel": VPP2, "steps": 2, "load": "tp2"},
    "tp2 as ep2": {"parallel": EP2, "steps": 2, "load": "tp2"},
    "pp2 vpp2": {"parallel": VPP2, "steps": 2, "save": "vpp2"},
    "pp2 vpp2 resumed": {"parallel": VPP2, "steps": 2, "load": "vpp2"},
    "uneven pp2": {"parallel": UNEVEN, "steps": 2, "save": "uneven"},
    "uneven pp2 as ep2": {"parallel": EP2, "steps": 2, "load": "uneven"},
    "pp2 vpp2 as tp2": {"parallel": TP2, "steps": 2, "load": "vpp2"},
    "ep2 as laid out": {"parallel": LAID_OUT, "steps": 2, "load": "ep2"},
    "laid out": {"parallel": LAID_OUT, "steps": 2, "save": "laid out"},
    "laid out resumed": {"parallel": LAID_OUT, "steps": 2, "load": "laid out"},
    "laid out as tp2": {"parallel": TP2, "steps": 2, "load": "laid out"},
    "laid out in other stages": {"parallel": OTHERWISE, "steps": 2, "load": "laid out"},
}
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
DROPOUT: dict[str, dict[str, Any]] = {
    "dropout whole": {"parallel": EP2, "steps": 4, "dropout": 0.2},
    "dropout": {"parallel": EP2, "steps": 2, "save": "dropout", "dropout": 0.2},
    "dropout resumed": {"parallel": EP2, "steps": 2, "load": "dropout", "dropout": 0.2},
    "dropout of stages": {"parallel": PP2, "steps": 0, "dropout": 0.2},
    "dropout to stages": {"parallel": PP2, "steps": 0, "load": "dropout", "dropout": 0.2},
}
BACKGROUND = {
    "whole": {"parallel": EP2, "steps": 4},
    "written while training": {"parallel": EP2, "steps": 3, "save": "ep2", "background": True},
    "resumed": {"parallel": EP2, "steps": 2, "load": "ep2"},
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


def far(seen: list[list[float]], expected: list[list[float]]) -> float:
    """The largest relative difference; not a number is larger than any."""
    pairs = [(a, b) for x, y in zip(seen, expected, strict=True) for a, b in zip(x, y, strict=True)]
    return max((abs(a - b) / abs(b) for a, b in pairs), key=lambda each: (math.isnan(each), each))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, installed: Core) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("stretches")
    plan = PLAN | SCALES | DROPOUT | UNDIVIDED | ALONE
    found: dict[str, Any] = launch("tests.checkpoints.stretches", folder, 2, plan, installed)
    return found


def test_a_resumed_run_goes_on_bit_for_bit(seen):
    assert seen["ep2 resumed"]["step"] == 2
    assert seen["ep2 resumed"]["losses"] == seen["whole"]["losses"][2:]
    assert seen["ep2 resumed"]["notes"] == []
    assert seen["ep2 resumed"]["metrics"] == {"sum": 0.1 + 0.2}


@pytest.mark.parametrize("name", [name for name in PLAN if " as " in name])
def test_any_layout_loads_any_other_and_the_losses_go_on(seen, name, messages):
    # Gradient norms of layouts agree to 1e-4, losses to 1e-5: the same bounds as for layouts from scratch.
    losses = [step[:-1] for step in seen[name]["losses"]]
    assert far(losses, [step[:-1] for step in seen["whole"]["losses"][2:]]) < 1e-5
    assert far(seen[name]["losses"], seen["whole"]["losses"][2:]) < 1e-4
    (note,) = seen[name]["notes"]
    assert "random states" in note
    messages(note)


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


def test_dropout_goes_on_with_the_masks_that_it_would_have_had(seen):
    assert seen["dropout whole"]["losses"][0] != seen["whole"]["losses"][0]
    assert seen["dropout resumed"]["losses"] == seen["dropout whole"]["losses"][2:]


def test_stages_drop_other_values_and_none_come_again_in_another_layout(seen):
    begun, resumed = (seen[f"dropout {how} stages"]["random"] for how in ("of", "to"))
    assert len({*begun, *resumed}) == 4


def test_a_checkpoint_written_in_the_background_is_the_state_of_its_step(tmp_path: Path, installed: Core):
    found = launch("tests.checkpoints.stretches", tmp_path, 2, BACKGROUND, installed)
    assert found["resumed"]["step"] == 2
    assert found["resumed"]["losses"] == found["whole"]["losses"][2:]


@pytest.mark.slow
def test_every_release(request: pytest.FixtureRequest, core: Core, tmp_path: Path):
    early = packages.is_within(core.version, "<0.14")  # no MTP layers are laid out
    left_out = ("cp2", "laid out") if early else ("cp2",)
    plans = [{name: of for name, of in PLAN.items() if not any(word in name for word in left_out)}]
    if core.version.startswith("0.12."):  # it cannot forget its groups: one layout per process
        of_one = ("whole", "ep2", "ep2 resumed"), ("pp2 vpp2", "pp2 vpp2 resumed")
        plans = [{name: PLAN[name] for name in names} for names in of_one]
    found: dict[str, Any] = {}
    for number, plan in enumerate(plans):
        folder = tmp_path / str(number)
        folder.mkdir()
        found |= (
            launch("tests.checkpoints.stretches", folder, 2, plan, core)
            if core.tree
            else request.getfixturevalue("seen")
        )
    assert found["ep2 resumed"]["losses"] == found["whole"]["losses"][2:]
    for name in (name for plan in plans for name in plan):
        if " as " in name or name == "pp2 vpp2 resumed":
            assert far(found[name]["losses"], found["whole"]["losses"][2:]) < 1e-4, name
