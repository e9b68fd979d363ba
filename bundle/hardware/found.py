"""What a vendor's module reports: the same shape for NVIDIA and Ascend, so that choosing between them is one
place.
"""

from bundle.frozen import frozen
from bundle.hardware.facts import Device, Fact


@frozen
class Found:
    """One vendor's devices: `present` in this container, of which `devices` are visible, and why."""

    backend: str
    noun: str  # "GPU", "NPU"
    present: int
    devices: tuple[Device, ...]
    reason: str
    driver: Fact[str]
    toolkit: Fact[str]
    link: Fact[str]
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
