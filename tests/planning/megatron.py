"""Megatron-core made ready in this process for planning tests, with every patch that the cpu needs."""

from typing import Any

from bundle import backends
from bundle.environment import packages
from bundle.patches import megatron_core, patcher
from bundle.patches import plan as patch_plan


def ready() -> Any:
    """The cpu's runtime, with all patches for the megatron-core on the path applied."""
    here, reviewed = packages.detect(), megatron_core.load_review_table()
    of = megatron_core.find_installed_core(here, reviewed)
    patcher.apply(patch_plan.build_patch_plan(patch_plan.survey_patches(of, reviewed, here, backend="cpu")))
    return backends.prepare("cpu")
