"""MTP trains in the forward pass that gives log-probabilities; detached it leaves the trunk alone.

Reinforcement learning wants logits or log-probabilities, and asked megatron for logits without labels: an
error up to 0.16, no training of MTP in 0.17 and 0.18, from 0.19 on training in evaluation too.
"""

import pytest

from bundle.verification import WorkOrder, build_needed_patch_plan, decide_patches

LOGITS = "bundle.verification.measurements.mtp:measure_logits_without_labels"
HERE = "tests.seeds.prediction"


@pytest.fixture(scope="module")
def seen(core):
    """What one rank saw: logits without labels (as megatron is, and patched), then the engine's."""
    found = decide_patches("cpu", core.tree)
    applied = tuple(decision.id for decision in found.patches_to_apply)
    stock = tuple(one for one in applied if one not in ("mtp-without-labels", "mtp-labels-from-input"))
    measurements = (LOGITS, *(f"{HERE}:{name}" for name in ("falls", "reached", "reached_detached")))
    orders = [WorkOrder(0, LOGITS, 1, 60, stock)]
    orders += [WorkOrder(n, name, 1, 60, applied) for n, name in enumerate(measurements, start=1)]
    results = core.world.observe(orders, build_needed_patch_plan(found))
    return [one for (one,) in results]


@pytest.mark.world
def test_without_labels_logits_still_come(seen):
    stock, patched, *_ = seen
    assert stock.raised or stock.gap >= 1.0, "megatron gives logits without labels by itself here"
    assert patched.gap == 0.0, patched  # those of a model without MTP, whose layers did not run


@pytest.mark.world
def test_mtp_learns_while_an_objective_reads_log_probs(seen):
    falls = seen[2]
    assert falls.gap is not None and falls.gap < 0.95, falls


@pytest.mark.world
def test_detached_it_does_not_move_trunk_or_embeddings(seen):
    reached, detached = seen[3:]
    assert reached.gap is not None and reached.gap > 1e-4, reached
    assert detached.gap == 0.0, detached
