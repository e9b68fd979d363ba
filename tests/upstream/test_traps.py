"""Known traps: each still bites in the releases that it is listed for, and in no other one.

A trap that no longer bites, or bites in another way, fails: then its range or its patch is to be written.
"""

import functools
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path

import pytest

from bundle.environment import packages
from bundle.patches.catalogue import TRAPS
from bundle.verification import WorkOrder, build_needed_patch_plan, decide_patches
from bundle.verification.check import Gap, Observation, Raises, matches
from tests.world import observe

AGREES = 1e-4


@dataclass(frozen=True)
class Case:
    """An experiment of tests.upstream.experiments; without expectations it shows the way out of a trap."""

    experiment: str
    trap: str | None = None
    world: int = 2
    expected: tuple[Raises | Gap, ...] = ()


CASES = (
    Case(
        "experts",
        "moe-tensor-without-expert-parallel",
        expected=(Gap(1e-3), Raises("AssertionError", "divisible by tensor parallel size")),  # 0.12
    ),
    Case("experts_cut_alone", "moe-tensor-without-expert-parallel", expected=(Gap(1e-3),)),
    Case("experts_split_over_tensor_ranks"),
    Case(
        "packed_prediction",
        "mtp-packed",
        1,
        (Raises("AssertionError", "sequence packing is not yet supported"),),
    ),
    Case("prediction_over_tensor_ranks", "mtp-tensor-parallel", expected=(Gap(1e-3),)),
    Case("interleaved", "interleaved-batched-exchange", expected=(Gap(1e-3),)),
    Case("interleaved_without_batches"),
    Case("overlap_detached"),
    Case(
        "overlap_tied",
        "overlap-tied-mtp",
        expected=(Raises("AssertionError", "Communication call has not been issued"),),
    ),
    Case("overlap_tied_without_the_head"),
    Case(
        "saved_tied",
        "tied-mtp-checkpoint",
        expected=(Raises("AssertionError", "dict_keys("),),
    ),
    Case("saved_tied_without_the_head"),
    Case("overlap_in_buckets"),
    Case(
        "latent_attention_without_sequence_parallelism",
        "mla-tensor-without-sequence-parallel",
        expected=(Raises("RuntimeError", "must match the size of tensor"),),
    ),
    Case("balancing_of_prompts", "balancing-of-prompts", 1, (Gap(1.0),)),
    Case("balancing_of_packs", "balancing-of-packs", 1, (Gap(1e-2),)),
    Case("balancing_of_padding", "balancing-of-padding", 1, (Gap(1e-2),)),
    Case(
        "packed_gated_delta",
        "gated-delta-net-packed",
        1,
        (Raises("NotImplementedError", "does not support packed sequence"),),
    ),
    Case("prediction_with_two_outputs"),  # reported, and not so
)


@functools.cache
def _seen(tree: Path | None) -> dict[Case, list[Observation]]:
    """What every experiment saw in a release."""
    found = decide_patches("cpu", tree)
    ids = tuple(decision.id for decision in found.patches_to_apply)
    orders = [
        WorkOrder(number, f"tests.upstream.experiments:{case.experiment}", case.world, 60, ids)
        for number, case in enumerate(CASES)
    ]
    return dict(
        zip(
            CASES,
            observe(orders, build_needed_patch_plan(found), backend="cpu", root=found.core.root),
            strict=True,
        )
    )


def _check(case: Case, version: str, tree: Path | None) -> None:
    seen = _seen(tree)[case]
    trap = next((trap for trap in TRAPS if trap.id == case.trap), None)
    if trap is not None and packages.is_base_version_within(version, trap.range):
        assert any(matches(one, other) for one in case.expected for other in seen), seen
    else:
        assert all(one.gap is not None and one.gap <= AGREES for one in seen), seen


def test_every_trap_has_an_experiment_or_says_what_one_would_take():
    assert {trap.id for trap in TRAPS if not trap.unshown} == {case.trap for case in CASES if case.trap}


@pytest.mark.world
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.experiment)
def test_default_release(case):
    _check(case, installed_version("megatron-core"), None)


@pytest.mark.matrix
@pytest.mark.world
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.experiment)
def test_every_release(case, release_trees, proven):
    for version, tree in release_trees.items():
        _check(case, version, tree)
        proven("every trap is there, or was mended", core=version)
