"""A rank's runtime: the planned patches first, then its backend, and only then megatron."""

from typing import TYPE_CHECKING

from bundle import backends
from bundle.patches import applying, plan
from bundle.planning import Plan

if TYPE_CHECKING:
    from bundle.backends import Runtime


def patched_runtime(of: Plan) -> "Runtime":
    """The runtime of the planned backend; the planned patches stay in force for the life of this process.

    Raises PatchError where megatron-core is not the planned one.
    """
    applying.apply(plan.make(of.patches))
    return backends.prepare(of.hardware.backend)
