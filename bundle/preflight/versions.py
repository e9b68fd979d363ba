"""Whether driver and packages can run a job: `python -m bundle.preflight.versions BACKEND`."""

import sys

from bundle.environment import machine, packages
from bundle.environment.doctor import examine
from bundle.environment.machine import Level, Machine
from bundle.environment.packages import Stack
from bundle.preflight import Found


def probe(here: Machine, installed: Stack, backend: str) -> Found:
    """What doctor finds that must be fixed first, and the versions."""
    hardware, findings = examine(here, installed, backend)
    versions = [f"{package.name} {package.version}" for package in installed.packages()]
    if hardware is not None and hardware.driver.value is not None:
        versions.append(f"driver {hardware.driver.value}")
    wrong = [f"{each.subject}: {each.cause}" for each in findings if each.level is Level.FAIL]
    return Found(wrong="; ".join(wrong), said=", ".join(versions))


if __name__ == "__main__":
    probe(machine.local(), packages.detect(), sys.argv[1]).tell()
