"""What machine this is, from files, the environment and the vendors' tools; no framework is imported."""

from bundle.hardware.detection import BACKENDS, detect
from bundle.hardware.facts import Device, Fact, Hardware, Host, plain
from bundle.hardware.machine import Machine, local
from bundle.hardware.presets import NAMES, preset

__all__ = [
    "BACKENDS",
    "NAMES",
    "Device",
    "Fact",
    "Hardware",
    "Host",
    "Machine",
    "detect",
    "local",
    "plain",
    "preset",
]
