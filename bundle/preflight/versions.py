"""The check that driver and packages can run a job: `python -m bundle.preflight.versions BACKEND`."""

import sys

from bundle.environment import machine, packages
from bundle.environment.doctor import examine
from bundle.environment.machine import Level, Machine
from bundle.environment.packages import InstalledPackages
from bundle.preflight import ProbeResult


def probe(local_machine: Machine, installed: InstalledPackages, backend: str) -> ProbeResult:
    """Return the versions, and doctor's findings that must be fixed before a job."""
    hardware, findings = examine(local_machine, installed, backend)
    versions = [f"{package.name} {package.version}" for package in installed.list_tracked_packages()]
    if hardware is not None and hardware.driver.value is not None:
        versions.append(f"driver {hardware.driver.value}")
    defects = [f"{finding.subject}: {finding.cause}" for finding in findings if finding.level is Level.FAIL]
    return ProbeResult(wrong="; ".join(defects), note=", ".join(versions))


if __name__ == "__main__":
    probe(machine.build_local_machine(), packages.detect(), sys.argv[1]).print_result()
