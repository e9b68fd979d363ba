"""MTP metrics under context parallelism: reduced by the source rank alone they hang (verl#5895).

Megatron's tracker is reduced over data and context parallel ranks; only the rank that writes metrics called
it. The engine's sums are reduced by every rank, and are right where the tracker is a mean of rank means.
"""

import pytest

from bundle.environment import packages
from bundle.verification import WorkOrder, build_needed_patch_plan, decide_patches

HERE, ENGINE = "tests.seeds.prediction", "tests.engine.experiments:means"


@pytest.mark.world
def test_two_context_parallel_ranks(core):
    if not packages.is_base_version_within(core.version, "<0.19"):
        pytest.skip("the tracker is called otherwise from 0.19 on")
    found = decide_patches("cpu", core.tree)
    applied = tuple(decision.id for decision in found.patches_to_apply)
    names = (f"{HERE}:logged_alone", f"{HERE}:logged", ENGINE)
    orders = [WorkOrder(number, name, 2, 60, applied) for number, name in enumerate(names)]
    alone, together, engine = core.world.observe(orders, build_needed_patch_plan(found))
    assert alone[0].raised and "imed out" in alone[0].message, alone
    assert [one.gap for one in together] == [0.0, 0.0], together
    assert all(one.gap is not None and one.gap <= 1e-5 for one in engine), engine
