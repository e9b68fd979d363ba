"""The patches in a program that is not ours: decided for what it imports, applied, and told."""

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping

from bundle import log
from bundle.environment import hardware, packages
from bundle.environment.packages import InstalledPackages
from bundle.errors import EnvironmentUnfit, PatchError
from bundle.patches import audit, patcher, plan
from bundle.patches.audit import AuditedDefect, DefectStatus
from bundle.patches.catalogue import PATCHES
from bundle.patches.entry import Decision, PatchAction, describe_features, resolve_features
from bundle.patches.megatron_core import find_installed_core, load_review_table
from bundle.patches.monkey_patches import MonkeyPatch
from bundle.patches.plan import PatchPlan, Survey, build_context, survey_patches

_log = logging.getLogger(__name__)
_FEATURES_BY_PATCH = {patch.id: patch.when for patch in PATCHES}


def enable(
    features: Iterable[str] | None = None,
    *,
    vouched: Collection[str] = (),
    allowed: Collection[str] = (),
    backend: str = "auto",
    strict: bool = False,
) -> PatchPlan:
    """Patches the megatron-core that this process imports, or has imported; the plan is logged, once.

    `features` are words of `entry.FEATURES` for what the program uses; without them everything counts as
    used, and traps, which no patch mends, are not told. A patch that assumes something of its caller is left
    out unless `vouched` has its id, and so is one whose defect a framework beside it mends, or may mend.
    `allowed` are drifts, and frameworks' code that nobody has read, to go on with; `backend` is one of
    `hardware.BACKEND_CHOICES`. Neither torch nor megatron is imported. Called again with the same
    words it does nothing.

    A patch that fits no more stops a program that is known to use what it mends; without `features` it is
    left out and warned of, unless `strict` has it stop there too.

    Raises UsageError for unknown words and ids, EnvironmentUnfit where there is no megatron-core, PatchError,
    with nothing patched, for such a patch, where another patcher or another plan was there before, and where
    somebody has imported what is to be replaced by value.
    """
    patch_survey, patch_plan = plan_patches(
        packages.detect_process_packages(),
        features,
        vouched=vouched,
        allowed=allowed,
        backend=backend,
        strict=strict,
    )
    if patch_plan == patcher.get_active_plan():
        return patch_plan
    if early_imports := patcher.find_early_imports(patch_plan):
        raise PatchError("Enable the patches before these are imported from megatron:", early_imports)
    patcher.apply(patch_plan)
    _log_plan(patch_survey, resolve_features(features or ()))
    return patch_plan


def plan_patches(
    stack: InstalledPackages,
    features: Iterable[str] | None = None,
    *,
    vouched: Collection[str] = (),
    allowed: Collection[str] = (),
    backend: str = "auto",
    strict: bool = False,
) -> tuple[Survey, PatchPlan]:
    """What `enable` decides, and applies, in a program that imports from `stack`; raises as it does."""
    used, table = resolve_features(features or ()), load_review_table()
    if stack.megatron.core is None:
        archive = stack.megatron.archive
        raise EnvironmentUnfit(
            f"megatron-core is in a zip, which cannot be patched: {archive}"
            if archive
            else "there is no megatron-core to patch: this Python imports none; install one beside "
            "mcore-bundle, or put its tree on PYTHONPATH"
        )
    core, backend_name = find_installed_core(stack, table), hardware.detect(backend).backend
    patch_survey = survey_patches(
        core, table, stack, backend=backend_name, features=used, allowed=allowed, vouched=vouched
    )
    needed = {d.id for d in patch_survey.decisions if d.action in (PatchAction.APPLY, PatchAction.DRIFT)}
    patches = [patch for patch in PATCHES if patch.id in needed]
    job = build_context(core, stack, backend=backend_name, features=used)
    monkey_patches, framework_defects = audit.find_framework_defects(
        stack.find_frameworks(), patches, core, core.build_reader(table), job
    )
    overrides = {DefectStatus.CONDITIONAL: vouched, DefectStatus.UNKNOWN: allowed}
    decided = (
        _defer_to_framework(d, monkey_patches, framework_defects.get(d.id), overrides)
        for d in patch_survey.decisions
    )
    # What the program does is not ours to refuse: a trap is told, and a patch of what it may not use.
    reported_actions = (
        {PatchAction.TRAP} if used is not None or strict else {PatchAction.TRAP, PatchAction.DRIFT}
    )
    decisions = tuple(d if d.action not in reported_actions else d._replace(stops=False) for d in decided)
    patch_survey = patch_survey._replace(decisions=decisions)
    return patch_survey, plan.build_patch_plan(patch_survey)


def _defer_to_framework(
    decision: Decision,
    monkey_patches: Iterable[MonkeyPatch],
    framework_defect: AuditedDefect | None,
    overrides: Mapping[DefectStatus, Collection[str]],
) -> Decision:
    """OWNED where a framework mends the defect, or has put code of its own in the place that ours is for.

    So it is where it may mend it, unless `overrides` has the patch: twice mended is wrong again. A program
    may be none of the jobs in which it is mended; of code that nobody has read, the caller's say tells
    nothing.
    """
    replacing = tuple(
        patch
        for patch in monkey_patches
        if patch.target in decision.targets and not (patch.wraps or patch.conditions)
    )
    reason = None
    if framework_defect is not None and framework_defect.status is DefectStatus.MENDED:
        reason = framework_defect.reason
    elif decision.action is PatchAction.APPLY and replacing:
        reason = f"{audit.describe_replacements(replacing)}, which this patch was not read with"
    elif (
        decision.action is PatchAction.APPLY
        and framework_defect is not None
        and framework_defect.status is not DefectStatus.PRESENT
    ):
        reason = None if decision.id in overrides[framework_defect.status] else framework_defect.reason
    return decision._replace(action=PatchAction.OWNED, reason=reason, stops=False) if reason else decision


def _log_plan(patch_survey: Survey, used: frozenset[str] | None) -> None:
    """Logs what was decided; where nobody has set up logging, as a rank of ours does."""
    if not logging.getLogger("bundle").hasHandlers():
        rank = os.environ.get("RANK", "")
        log.start(int(rank) if rank.isdecimal() else None)
    _log.info("%s", "\n".join(format_lines(patch_survey)))
    for warning in iter_warnings(patch_survey, used):
        _log.warning("%s", warning)


def iter_warnings(patch_survey: Survey, used: frozenset[str] | None) -> Iterator[str]:
    """What no patch mends in a program that uses this (None: nobody says), though it meets it or may."""
    for decision in patch_survey.decisions:
        if decision.action is PatchAction.TRAP and used is not None:
            yield f"no patch mends {decision.problem}"
        elif decision.action is PatchAction.DRIFT and used is None and decision.id in _FEATURES_BY_PATCH:
            features = describe_features(_FEATURES_BY_PATCH[decision.id])
            yield (
                f"left out, and needed {f'if you use {features}' if features else 'in any job'}:"
                f" {decision.problem}"
            )


def format_lines(patch_survey: Survey) -> Iterator[str]:
    """The plan: what is applied, what is not although the program may need it, and why."""
    left_out = [d for d in patch_survey.decisions if d.action in (PatchAction.OWNED, PatchAction.UNVOUCHED)]
    yield f"{len(patch_survey.patches_to_apply)} patches for {patch_survey.core}"
    for decision in (*patch_survey.patches_to_apply, *left_out):
        yield f"  {decision.action} {decision.id}: {decision.reason}"
    if any(decision.action is PatchAction.UNVOUCHED for decision in left_out):
        yield "  (UNVOUCHED ones are applied where their ids are in `vouched`, or after --vouch)"
