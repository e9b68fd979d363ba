"""The plan as a file, and what ranks compare."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from bundle.environment.packages import InstalledPackages
from bundle.environment.search import build_search_path
from bundle.errors import PatchError, UsageError
from bundle.patches import plan as planning
from bundle.patches.catalogue import PATCHES, TRAPS
from bundle.patches.entry import (
    EXTERNAL_PROGRAM_FEATURES,
    DefectKind,
    Patch,
    PatchAction,
    Presence,
    Replacement,
    detect_in_source,
)
from bundle.patches.megatron_core import load_review_table as load_table
from bundle.patches.megatron_core import resolve_core_path_or_version
from bundle.patches.plan import PatchPlan, Survey, build_patch_plan, load_patch_plan, survey_patches
from bundle.recipe import load as load_recipe
from tests.environment.trees import install, stack_of
from tests.patches.trees import Release, copied

EMPTY = InstalledPackages(build_search_path([], "", Path("/nonexistent")))
FEATURES = frozenset({"mla", "packed", "unequal-head-dims", "attention-auto", "mtp", "cp"})
VALUE_PADDING = "mla-thd-value-padding"
ATTENTION = "megatron.core.transformer.multi_latent_attention"


def surveyed(mcore: Path | str, features: frozenset[str] | None = FEATURES) -> Survey:
    return survey_patches(
        resolve_core_path_or_version(str(mcore), load_table()),
        load_table(),
        EMPTY,
        backend="cuda",
        features=features,
    )


def planned(mcore: Path) -> PatchPlan:
    return build_patch_plan(surveyed(mcore))


def test_a_plan_survives_its_file(release: Release):
    plan = planned(release("0.16.1"))
    assert plan.steps
    assert load_patch_plan(json.loads(json.dumps(plan.dump()))) == plan


def test_what_ranks_compare_says_nothing_of_paths(release: Release, tmp_path: Path):
    here = planned(release("0.16.1"))
    there = planned(copied(release("0.16.1"), tmp_path, {}))
    assert (
        here.get_rank_invariant_fields() == there.get_rank_invariant_fields() and here.digest == there.digest
    )
    assert str(tmp_path) not in json.dumps(there.dump())


@pytest.mark.parametrize(
    ("package", "theirs"), [("mindspeed", PatchAction.OWNED), ("megatron_adaptor", PatchAction.DRIFT)]
)
def test_our_jobs_are_patched_beside_mindspeed_and_what_another_framework_has_of_it_is_its_own(
    tmp_path: Path, package: str, theirs: PatchAction
):
    """Our ranks do not import it; a framework's do, and it may take the place of this class."""
    install(tmp_path, package, "0.12.1")
    of, beside = resolve_core_path_or_version("0.16.1", load_table()), stack_of(tmp_path)
    actions = [
        {
            decision.id: decision.action
            for decision in survey_patches(
                of, load_table(), beside, backend="ascend", vouched=vouched
            ).decisions
        }["mla-without-te-linear"]
        for vouched in (None, ())
    ]
    assert actions == [PatchAction.APPLY, theirs]


def test_another_release_another_decision_another_wrapper_show_in_the_fields(release: Release):
    plan = planned(release("0.16.1"))
    assert plan.get_rank_invariant_fields() != planned(release("0.17.1")).get_rank_invariant_fields()
    step = replace(plan.steps[0], wrapper_digest="0" * 16)
    other = replace(plan, steps=(step, *plan.steps[1:]))
    differing = {
        name
        for name, value in other.get_rank_invariant_fields().items()
        if plan.get_rank_invariant_fields()[name] != value
    }
    assert differing == {f"patch {step.patch}"}
    assert other.digest != plan.digest


def test_every_file_that_a_decision_read_is_in_the_plan(release: Release, tmp_path: Path):
    """Of a release, which the reviewed list speaks for, and of a tree that is parsed."""
    changed = {
        "transformer/moe/router.py": ("class TopKRouter(Router):", "class TopKRouter(Router):  # ours")
    }
    trees = (release("0.16.1"), copied(release("0.16.1"), tmp_path, changed))
    defects = [*(patch.defect for patch in PATCHES), *(trap.defect for trap in TRAPS)]
    for tree in trees:
        read = dict(planned(tree).module_digests)
        for target in {target for defect in defects for target in defect.evidence}:
            module = target.partition(":")[0]
            file = tree / f"{module.replace('.', '/')}.py"
            digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else ""
            assert read[module] == digest, module
    assert planned(trees[0]).get_rank_invariant_fields() != planned(trees[1]).get_rank_invariant_fields()


def test_steps_name_the_planned_files(release: Release):
    steps = {step.patch: step for step in planned(release("0.16.1")).steps}
    step, rolls = steps[VALUE_PADDING], steps["mtp-packed-roll-boundaries"]
    assert step.file == step.code_file == f"{ATTENTION.replace('.', '/')}.py"
    assert not step.everywhere
    assert rolls.everywhere


def test_a_name_imported_from_elsewhere_is_planned_for_that_namespace_only(release: Release):
    decided = surveyed(release("0.13.1"), frozenset({"mla", "packed"}))
    steps = {step.target.partition(":")[2]: step for step in build_patch_plan(decided).steps}
    step = steps["apply_rotary_pos_emb"]
    assert Path(step.file).stem == "multi_latent_attention" and Path(step.code_file).stem == "rope_utils"
    assert not step.everywhere


def test_auto_attention_is_taken_for_flash_and_says_so(release: Release, messages):
    unfused = (FEATURES - {"attention-auto"}) | {"attention-unfused"}
    for features, action, value in (
        (FEATURES, PatchAction.APPLY, "attention: auto"),
        (unfused, PatchAction.SKIP, "attention-flash"),
    ):
        rows = {decision.id: decision for decision in surveyed(release("0.16.1"), features).decisions}
        assert rows[VALUE_PADDING].action is action and value in rows[VALUE_PADDING].reason
        messages(rows[VALUE_PADDING].reason)


def test_a_version_without_a_tree_cannot_be_applied(messages):
    with pytest.raises(PatchError, match=r"0\.16\.1") as error:
        build_patch_plan(surveyed("0.16.1"))
    messages(error.value)


def test_a_recipe_that_meets_a_trap_gets_no_plan(release: Release, messages):
    with pytest.raises(UsageError, match=r"data\.packed") as error:
        planned(release("0.13.1"))
    assert any(violation.startswith("mtp-packed: ") for violation in error.value.violations)
    messages(error.value)


def test_a_job_that_needs_what_drifted_gets_no_plan(release: Release, tmp_path: Path, messages):
    edits = {
        "transformer/multi_latent_attention.py": (
            "class MultiLatentAttention(Attention):",
            "class LatentAttention(Attention):",
        )
    }
    tree = copied(release("0.16.1"), tmp_path, edits)
    with pytest.raises(PatchError, match=f"{VALUE_PADDING}: DRIFT") as error:
        planned(tree)
    messages(error.value)
    plan = build_patch_plan(surveyed(tree, frozenset({"moe"})))
    assert dict(plan.decisions)[VALUE_PADDING] == "DRIFT"  # said, but nothing to stop for


def test_a_patch_whose_wrapper_is_missing_is_an_error(
    release: Release, monkeypatch: pytest.MonkeyPatch, messages
):
    target = "megatron.core.transformer.multi_token_prediction:roll_tensor"
    patch = Patch(
        id="mtp-without-labels",
        replacements=(Replacement(target, "nowhere:f"),),
        why="",
        kind=DefectKind.SILENT,
        upstream="",
        range="",
        defect=detect_in_source()(lambda source: Presence.PRESENT),
    )
    monkeypatch.setattr(planning, "PATCHES", (patch,))
    with pytest.raises(PatchError, match=r"replacements\.nowhere") as error:
        planned(release("0.16.1"))
    messages(error.value)


@pytest.mark.parametrize("document", [{}, {"schema": 1}, {"schema": 2, "megatron-core": [], "decisions": []}])
def test_a_file_that_is_no_plan_is_refused(document: dict[str, object], messages):
    with pytest.raises(PatchError) as error:
        load_patch_plan(document)
    messages(error.value)


@pytest.mark.parametrize("version", ["0.12.3", "0.16.1", "0.19.2"])
def test_what_the_engine_computes_is_patched_in_the_jobs_of_others_only(release: Release, version: str):
    overrides = ["parallel.tp=2", "parallel.cp=2", "model.mtp.layers=1", "devices.per_node=4"]
    ours = load_recipe("demo", overrides).features
    assert {"moe", "mtp", "cp"} <= ours
    own, others = (
        {decision.id: decision for decision in surveyed(release(version), features).decisions}
        for features in (ours, None)
    )
    about = {patch.id for patch in PATCHES if patch.when & EXTERNAL_PROGRAM_FEATURES}
    theirs = {id for id in about if others[id].action is PatchAction.APPLY}
    assert any(id.startswith("mtp-") for id in theirs)
    for id in about:
        assert own[id].action is PatchAction.SKIP
        assert any(feature in own[id].reason for feature in EXTERNAL_PROGRAM_FEATURES) or id not in theirs
