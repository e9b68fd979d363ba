"""Megatron-core made ready in this process for planning tests, with every patch that the cpu needs."""

from typing import Any

from bundle.environment import packages
from bundle.patches import megatron_core
from bundle.patches import plan as patch_plan
from bundle.worker import prepare_runtime


def plan_needed_patches() -> patch_plan.PatchPlan:
    """Return the patches that the megatron-core on the path needs on the cpu."""
    here, reviewed = packages.detect(), megatron_core.load_review_table()
    of = megatron_core.find_installed_or_default_core(here, reviewed)
    return patch_plan.build_patch_plan(patch_plan.survey_patches(of, reviewed, here, backend="cpu"))


def ready() -> Any:
    """The cpu's runtime, with these applied."""
    return prepare_runtime(plan_needed_patches(), "cpu")
