"""Whose a target is where a job of ours trains through MindSpeed, and where somebody else's does."""

from dataclasses import replace
from pathlib import Path

import pytest

from bundle.environment.packages import InstalledPackages
from bundle.environment.search import build_search_path
from bundle.patches import mindspeed
from bundle.patches.catalogue import PATCHES
from bundle.patches.decision_rules import PatchContext, decide_patch
from bundle.patches.entry import (
    LOCAL_LAYER_BACKENDS,
    DefectKind,
    Patch,
    PatchAction,
    Presence,
    Replacement,
    detect_in_definitions,
)
from bundle.patches.megatron_core import Reading, load_review_table, resolve_core_path_or_version
from bundle.patches.plan import Survey, survey_patches
from tests.environment.trees import install, stack_of

NOBODY = InstalledPackages(build_search_path([], "", Path("/nonexistent")))
FEATURES = frozenset({"mindspeed", "moe", "mla", "router-replay"})
REPLACED = "megatron.core.fp8_utils:quantize_param_shard"
# MindSpeed replaces it by features that our jobs leave off.
ONLY_MAY = "megatron.core.transformer.moe.router:TopKRouter.routing"
LOCAL_PATCH, PATCH_OF_ALL = "mla-without-te-linear", "router-replay-by-layer"
HEAD = next(of for of in mindspeed.SUPPORTED_TRAINING_BRANCHES if of.branch == "core_r0.15.3")
OURS = PatchContext(version="0.15.3", backend="ascend", mindspeed=(HEAD.commit,), trains_with_mindspeed=True)


def patch_of(target: str, **more) -> tuple[Patch, Reading]:
    of = Patch(
        id="p",
        replacements=(Replacement(target, "a:w"),),
        why="why",
        kind=DefectKind.SILENT,
        upstream="upstream",
        range="",
        defect=detect_in_definitions(target)(lambda code: Presence.PRESENT),
    )
    return of._replace(**more), Reading(Presence.PRESENT, {target: "aa"}, {target: ("0.15.3",)})


@pytest.mark.parametrize(
    ("version", "branch"),
    [
        ("0.12.3", "26.1.0_core_r0.12.1"),
        ("0.13.1", None),
        ("0.14.0", None),
        ("0.15.3rc0", "core_r0.15.3"),
        ("0.16.1", "core_r0.16.0"),
        ("0.17.0", None),
    ],
)
def test_a_megatron_has_one_branch_that_was_read_or_none(version, branch):
    found = mindspeed.find_branch_by_megatron_version(version)
    assert (found.branch if found else None) == branch
    assert found is None or mindspeed.BRANCH_BY_COMMIT[found.commit] == branch


def test_what_is_replaced_in_our_jobs_are_targets_of_ours():
    targets = {replacement.target for patch in PATCHES for replacement in patch.replacements}
    for of in mindspeed.SUPPORTED_TRAINING_BRANCHES:
        assert of.replaces and of.replaces <= targets


def test_in_our_jobs_it_owns_what_it_replaces_there_even_if_the_patch_is_asked_for(messages):
    patch, present = patch_of(REPLACED)
    decision = decide_patch(patch, present, OURS)
    assert (decision.action, decision.proven, decision.stops) == (PatchAction.OWNED, True, False)
    assert HEAD.branch in decision.reason and REPLACED in decision.reason
    messages(decision.reason)
    asked = decide_patch(patch, present, replace(OURS, requested=frozenset({"p"})))
    assert (asked.action, asked.stops) == (PatchAction.OWNED, True)


def test_in_our_jobs_it_does_not_own_what_it_replaces_in_others():
    patch, present = patch_of(ONLY_MAY)
    assert (
        decide_patch(patch, present, replace(OURS, trains_with_mindspeed=False)).action is PatchAction.OWNED
    )
    assert decide_patch(patch, present, OURS).action is PatchAction.APPLY


def test_patches_for_layers_without_transformer_engine_are_not_for_its_own(messages):
    patch, present = patch_of(ONLY_MAY, backends=LOCAL_LAYER_BACKENDS)
    decision = decide_patch(patch, present, OURS)
    assert decision.action is PatchAction.SKIP and "MindSpeed" in decision.reason
    messages(decision.reason)
    assert (
        decide_patch(patch, present, replace(OURS, trains_with_mindspeed=False, mindspeed=None)).action
        is PatchAction.APPLY
    )


def decided(stack: InstalledPackages, version: str = "0.16.1", features: frozenset[str] = FEATURES) -> Survey:
    table = load_review_table()
    return survey_patches(
        resolve_core_path_or_version(version, table), table, stack, backend="ascend", features=features
    )


def actions(found: Survey) -> dict[str, PatchAction]:
    return {decision.id: decision.action for decision in found.decisions}


def test_a_recipe_says_whether_its_job_is_decided_beside_mindspeed():
    without = actions(decided(NOBODY, features=FEATURES - {"mindspeed"}))
    through = actions(decided(NOBODY))
    assert (without[LOCAL_PATCH], through[LOCAL_PATCH]) == (PatchAction.APPLY, PatchAction.SKIP)
    assert without[PATCH_OF_ALL] is through[PATCH_OF_ALL] is PatchAction.APPLY


def test_beside_megatron_adaptor_nobody_read_who_owns_what(tmp_path, messages):
    install(tmp_path, "megatron_adaptor", "0.18.0")
    beside, alone = (decided(stack_of(tmp_path), features=of) for of in (FEATURES, FEATURES - {"mindspeed"}))
    found = next(d for d in beside.decisions if d.id == PATCH_OF_ALL)
    assert found.action is PatchAction.DRIFT and found.stops and "0.18.0" in found.reason
    messages(found.reason)
    assert PatchAction.DRIFT not in actions(alone).values()
