"""Patches for a program that is not ours: they are decided for what it imports, applied, and logged."""

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
from bundle.patches.entry import (
    Decision,
    PatchAction,
    format_non_implicit_features,
    parse_job_features_or_all,
)
from bundle.patches.megatron_core import find_installed_or_default_core, load_review_table
from bundle.patches.monkey_patches import MonkeyPatch
from bundle.patches.plan import PatchPlan, Survey, build_context, survey_patches

_log = logging.getLogger(__name__)
_CATALOGUE_FEATURES_BY_PATCH = {patch.id: patch.when for patch in PATCHES}


def enable(
    features: Iterable[str] | None = None,
    *,
    vouched: Collection[str] = (),
    allowed: Collection[str] = (),
    backend: str = "auto",
    strict: bool = False,
) -> PatchPlan:
    """Patch the megatron-core that this process imports, or has imported, and log the plan once.

    `features` are words of `entry.FEATURES` for what the program uses. Without them everything counts as
    used, and no trap is reported, because no patch mends a trap. A patch that assumes something about its
    caller is left out unless `vouched` has its id. A patch is also left out where a framework mends the
    defect, or may mend it. `allowed` are the drifts, and the frameworks' unread code, to go on with.
    `backend` is one of `hardware.BACKEND_CHOICES_WITH_AUTO`. Neither torch nor megatron is imported. A second
    call with the same words does nothing.

    A patch that no longer fits stops a program that is known to use what the patch mends. Without `features`
    the patch is left out with a warning; `strict` makes it stop the program there too.

    Raises UsageError for unknown words and ids, and EnvironmentUnfit where there is no megatron-core. Raises
    PatchError, with nothing patched, for a patch that stops the program, and where another patcher or another
    plan came first. It also raises PatchError where a module has imported by value a function that is to be
    replaced.
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
    if early_imports := patcher.describe_unpatchable_references(patch_plan):
        raise PatchError(
            "These functions of megatron were imported before their patches were enabled. Enable the patches"
            " first:",
            early_imports,
        )
    patcher.apply(patch_plan)
    _log_plan(patch_survey, parse_job_features_or_all(features or ()))
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
    """Return the survey and the plan that `enable` makes for a program that imports from `stack`.

    Raises the same errors as `enable`.
    """
    used, table = parse_job_features_or_all(features or ()), load_review_table()
    if stack.megatron.core is None:
        archive = stack.megatron.archive
        raise EnvironmentUnfit(
            f"megatron-core is in a zip archive, which cannot be patched: {archive}"
            if archive
            else "there is no megatron-core to patch: this Python cannot import it. Install it in the"
            " environment of mcore-bundle, or put its tree on PYTHONPATH"
        )
    core, backend_name = find_installed_or_default_core(stack, table), hardware.detect(backend).backend
    patch_survey = survey_patches(
        core, table, stack, backend=backend_name, features=used, allowed=allowed, vouched=vouched
    )
    needed = {d.id for d in patch_survey.decisions if d.action in (PatchAction.APPLY, PatchAction.DRIFT)}
    patches = [patch for patch in PATCHES if patch.id in needed]
    job = build_context(core, stack, backend=backend_name, features=used)
    monkey_patches, framework_defects = audit.audit_framework_patches(
        stack.find_megatron_frameworks(), patches, core, core.build_reader(table), job
    )
    overrides = {DefectStatus.CONDITIONAL: vouched, DefectStatus.UNKNOWN: allowed}
    decided = (
        _defer_to_framework(d, monkey_patches, framework_defects.get(d.id), overrides)
        for d in patch_survey.decisions
    )
    # We do not refuse another program: a trap is reported, and so is a patch that it may not need.
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
    """Return the decision, as OWNED where a framework mends the defect or replaces the target itself.

    The decision is OWNED also where a framework may mend the defect, unless `overrides` has the patch: a
    defect that is mended twice is wrong again. The program may not be one of the jobs in which the framework
    mends the defect. For code that nobody has read, `vouched` decides nothing; only `allowed` does.
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
        reason = f"{audit.describe_replacements(replacing)}. This patch was not reviewed with the replacement"
    elif (
        decision.action is PatchAction.APPLY
        and framework_defect is not None
        and framework_defect.status is not DefectStatus.PRESENT
    ):
        reason = None if decision.id in overrides[framework_defect.status] else framework_defect.reason
    reason = reason and f"{reason}. Therefore mcore-bundle does not apply its own patch"
    return decision._replace(action=PatchAction.OWNED, reason=reason, stops=False) if reason else decision


def _log_plan(patch_survey: Survey, used: frozenset[str] | None) -> None:
    """Log the decisions; where nobody has set up logging, set it up as for a rank of ours."""
    if not logging.getLogger("bundle").hasHandlers():
        rank = os.environ.get("RANK", "")
        log.start(int(rank) if rank.isdecimal() else None)
    _log.info("%s", "\n".join(format_plan_lines(patch_survey)))
    for warning in list_unfixed_defect_warnings(patch_survey, used):
        _log.warning("%s", warning)


def list_unfixed_defect_warnings(patch_survey: Survey, used: frozenset[str] | None) -> Iterator[str]:
    """Yield a warning for each defect that the program meets, or may meet, and that no patch mends.

    `used` are the features of the program; None: nobody says.
    """
    for decision in patch_survey.decisions:
        if decision.action is PatchAction.TRAP and used is not None:
            yield f"no patch fixes {decision.reason_line}"
        elif (
            decision.action is PatchAction.DRIFT
            and used is None
            and decision.id in _CATALOGUE_FEATURES_BY_PATCH
        ):
            features = format_non_implicit_features(_CATALOGUE_FEATURES_BY_PATCH[decision.id])
            yield (
                f"left out, but needed {f'if you use {features}' if features else 'in any job'}:"
                f" {decision.reason_line}"
            )


def format_plan_lines(patch_survey: Survey) -> Iterator[str]:
    """Yield the lines of the plan: the patches that are applied or left out although needed, with reasons."""
    left_out = [d for d in patch_survey.decisions if d.action in (PatchAction.OWNED, PatchAction.UNVOUCHED)]
    count = len(patch_survey.patches_to_apply)
    yield f"{count} patch{'es' * (count != 1)} for {patch_survey.core}"
    for decision in (*patch_survey.patches_to_apply, *left_out):
        yield f"  {decision.action} {decision.id}: {decision.reason}"
    if any(decision.action is PatchAction.UNVOUCHED for decision in left_out):
        yield "  (UNVOUCHED patches are applied if their ids are in `vouched`, or after --vouch)"
