"""The whole examination, in the order a reader asks: interpreter, image, machine, packages."""

import sys
from collections.abc import Iterator
from pathlib import Path

import bundle
from bundle import stack
from bundle.errors import EnvironmentUnfit
from bundle.hardware import Hardware, Machine, detect
from bundle.hardware.ascend import cann
from bundle.health.finding import Finding, fail
from bundle.health.image import image_findings
from bundle.health.interpreter import interpreter
from bundle.health.machine import machine_findings
from bundle.health.packages import package_findings


def examine(
    machine: Machine, installed: stack.Stack, backend: str = "auto"
) -> tuple[Hardware | None, tuple[Finding, ...]]:
    """The hardware (None if it cannot be told) and every finding about it and about the packages."""
    own = Path(bundle.__file__).parent
    findings = [*interpreter(sys.version_info[:2], installed.path, own)]
    findings += image_findings(machine, installed)
    try:
        hardware = detect(backend, machine)
    except EnvironmentUnfit as error:
        return None, (*findings, *_unfit(error))
    findings += machine_findings(hardware)
    findings += package_findings(installed, hardware, cann(machine), machine.environ)
    return hardware, tuple(findings)


def _unfit(error: EnvironmentUnfit) -> Iterator[Finding]:
    for cause in error.violations or (str(error),):
        yield fail("hardware", cause, "do what the line says, then run doctor again")
