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


def far(seen: list[list[float]], expected: list[list[float]]) -> float:
    """The largest relative difference; not a number is larger than any."""
    pairs = [(a, b) for x, y in zip(seen, expected, strict=True) for a, b in zip(x, y, strict=True)]
    return max((abs(a - b) / abs(b) for a, b in pairs), key=lambda each: (math.isnan(each), each))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, installed: Core) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("stretches")
    found: dict[str, Any] = launch("tests.checkpoints.stretches", folder, 2, PLAN | DROPOUT, installed)
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
    early = packages.is_base_version_within(core.version, "<0.14")  # no MTP layers are laid out
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
