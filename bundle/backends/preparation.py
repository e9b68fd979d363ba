"""Makes a backend ready in this process before megatron is imported: the patches first, then its runtime."""

import importlib
from typing import TYPE_CHECKING

from bundle.patches import applying, plan
from bundle.planning.planned import Planned

if TYPE_CHECKING:
    from bundle.mcore.runtime import Runtime


def prepare(of: Planned) -> "Runtime":
    """The runtime of the planned backend; the planned patches stay in force for the life of this process.

    Raises PatchError where megatron-core is not the planned one.
    """
    applying.apply(plan.make(of.survey))
    runtime: Runtime = importlib.import_module(
        f"bundle.backends.{of.plan.hardware.backend}.runtime"
    ).prepare()
    return runtime
