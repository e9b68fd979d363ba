"""Megatron-core made ready in this process for planning tests, with every patch that the cpu needs."""

from typing import Any

from bundle import backends
from bundle.environment import packages
from bundle.patches import applying, subject
from bundle.patches import plan as patch_plan


def ready() -> Any:
    """The cpu's runtime, with all patches for the megatron-core on the path applied."""
    here, reviewed = packages.detect(), subject.load()
    of = subject.installed(here, reviewed)
    applying.apply(patch_plan.make(patch_plan.survey(of, reviewed, here, backend="cpu")))
    return backends.prepare("cpu")
