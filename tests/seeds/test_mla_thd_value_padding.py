"""Latent attention packed, value heads narrower than query heads, for a kernel that wants one width.

Below 0.18 megatron hands the kernel what it refuses. Megatron-LM#3003 mends it in 0.18.0; verl switches its
own patch off from 0.16.2, a number that says nothing about it.
"""

import pytest

from bundle.environment import packages
from bundle.verification import WorkOrder, build_needed_patch_plan, decide_patches

PATCH = "mla-thd-value-padding"
PACKED_AGAINST_UNPACKED = (
    "bundle.verification.measurements.attention:measure_narrow_values"  # loss and every gradient
)
AGREES = 1e-5


def seen(core):
    """(whether it is applied, what a run without it saw, what a run with all that is applied saw)."""
    found = decide_patches("cpu", core.tree)
    applied = tuple(decision.id for decision in found.patches_to_apply)
    without = tuple(one for one in applied if one != PATCH)
    orders = [WorkOrder(n, PACKED_AGAINST_UNPACKED, 1, 60, ids) for n, ids in enumerate((without, applied))]
    (first,), (second,) = core.world.observe(orders, build_needed_patch_plan(found))
    return PATCH in applied, first, second


@pytest.mark.world
def test_unpatched_fails_and_patched_equals_the_unpacked_run(core):
    applied, without, with_it = seen(core)
    needed = packages.is_base_version_within(core.version, "<0.18")
    assert applied is needed
    if needed:
        assert without.raised and "thd" in without.message, without
    else:
        assert without.gap is not None and without.gap <= AGREES, without
    assert with_it.gap is not None and with_it.gap <= AGREES, with_it
