"""A rank's runtime: the planned patches first, then its backend, and only then megatron."""

from typing import TYPE_CHECKING

from bundle import backends
from bundle.patches import applying
from bundle.patches.plan import PatchPlan

if TYPE_CHECKING:
    from bundle.backends import Runtime


def patched_runtime(patches: PatchPlan, backend: str) -> "Runtime":
    """The runtime of a backend; the planned patches stay in force for the life of this process.

    Raises PatchError where megatron-core is not the planned one.
    """
    applying.apply(patches)
    return backends.prepare(backend)
