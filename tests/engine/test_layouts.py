"""One engine in every layout, packed or not: the numbers of `reference`, here and in other releases."""

import pytest

from bundle.environment import packages
from bundle.patches.catalogue import PATCHES
from bundle.patches.entry import EXTERNAL_PROGRAM_FEATURES
from bundle.verification import WorkOrder, build_needed_patch_plan, decide_patches
from bundle.verification.check import Observation
from tests.engine.cells import AGREES, GROUPS
from tests.world import Core

CELLS, DETACHING, STEERING = "tests.engine.experiments", "tests.engine.detaching", "tests.engine.steering"
ACCUMULATING, REPEATING = "tests.engine.accumulating", "tests.engine.repeating"
DEFAULT = (
    f"{ACCUMULATING}:everywhere",
    f"{REPEATING}:everywhere",
    *(f"{CELLS}:{name}" for name in GROUPS if "pairs" not in name and name != "crossed"),
    *(f"{DETACHING}:{name}" for name in ("everything", "tied", "recomputed")),
    *(f"{STEERING}:{name}" for name in ("moved", "left_out", "exchanges")),
)
OTHERS = (
    *(
        f"{CELLS}:{name}"
        for name in (
            *("pairs", "mtp pairs", "means", "packed means", "scores", "packed scores", "balancing"),
            *("balancing of prediction", "yarn"),
        )
    ),
    *(f"{DETACHING}:{name}" for name in ("everything", "tied", "recomputed")),
    *(f"{STEERING}:{name}" for name in ("moved", "left_out")),
)
PACKED_PREDICTION = ("mtp", "mtp pairs", "packed means", "packed scores", "balancing of prediction")
PREDICTION_OVER_TENSOR_RANKS = ("scores",)


def measured(names: tuple[str, ...], core: Core, world: int = 2) -> dict[str, list[Observation]]:
    """What all ranks saw of each measurement, with all patches that our own jobs need there."""
    return seen_by(core, dict.fromkeys(names, world))


def seen_by(core: Core, sizes: dict[str, int]) -> dict[str, list[Observation]]:
    """The same of measurements that take so many ranks each."""
    found = decide_patches("cpu", core.tree)
    of_others = {patch.id for patch in PATCHES if patch.when & EXTERNAL_PROGRAM_FEATURES}
    ids = tuple(decision.id for decision in found.patches_to_apply if decision.id not in of_others)
    orders = [WorkOrder(number, name, world, 90, ids) for number, (name, world) in enumerate(sizes.items())]
    return dict(zip(sizes, core.world.observe(orders, build_needed_patch_plan(found)), strict=True))


def wrong(seen: dict[str, list[Observation]], agrees: float = AGREES) -> dict[str, list[str]]:
    """The measurements in which a rank does not agree with the reference."""
    return {
        name: list(map(str, ranks))
        for name, ranks in seen.items()
        if not all(one.gap is not None and one.gap <= agrees for one in ranks)
    }


def possible(names: tuple[str, ...], release: str) -> tuple[str, ...]:
    """Without what the release cannot do, by its known traps: prediction in packs, or over tensor ranks."""
    left_out = {
        *(PACKED_PREDICTION if packages.is_base_version_within(release, "<0.16") else ()),
        *(PREDICTION_OVER_TENSOR_RANKS if packages.is_base_version_within(release, "<0.13") else ()),
    }
    return tuple(name for name in names if name.partition(":")[2] not in left_out)


@pytest.mark.world
def test_every_layout_trains_as_one_process_does(core):
    assert not wrong(measured(possible(OTHERS if core.tree else DEFAULT, core.version), core))


@pytest.mark.world
def test_tensor_and_context_parallel_together(installed):
    assert not wrong(measured((f"{CELLS}:crossed",), installed, world=4))
