"""Whether a node can do what a job will ask of it, found out by doing it: a module for each probe.

A probe is a process of its own, `python -m bundle.preflight.PROBE WORDS`, which has a time limit: a driver in
trouble never answers, and a file server late. It prints what it found as one line, `Found`.
"""

import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bundle import capabilities
from bundle.environment.machine import Finding, Hardware, fail, ok

# That the probes of devices may take together, torch's import included, and then the others.
SECONDS, QUICK_SECONDS = 300.0, 28.0
# A device that is slower than this share of its neighbours holds them all up.
SLOWEST = 0.9
DEVICE, DISK = "bundle.preflight.device", "bundle.preflight.disk"
_DISK, _QUICK_DISK = 1 << 30, 1 << 26  # bytes that are written and read
_LEAST_SHARED = 1 << 28  # what NCCL and gloo need of /dev/shm, and loaders


@dataclass(frozen=True)
class Found:
    """What a probe found: what it measured, by name and unit, and what is wrong, if anything."""

    measured: Mapping[str, float] = field(default_factory=dict)
    wrong: str = ""

    def tell(self) -> None:
        """Prints it for who started the probe."""
        print(json.dumps(asdict(self)))


@dataclass(frozen=True)
class Probe:
    """What is asked of a node: its subject, the module and its words, and what to do where it fails."""

    subject: str
    module: str
    words: tuple[str, ...]
    fix: str


def probes(hardware: Hardware, directory: Path, *, quick: bool) -> Iterator[Probe]:
    """What is asked of a node with this hardware, whose runs lie in `directory`."""
    device = capabilities.of(hardware.backend).device
    replace = "leave the node out until its device has been reset or replaced; the driver's log says more"
    for index in range(max(1, len(hardware.devices))):
        words = (device, str(index), "quick" if quick else "long")
        yield Probe(f"device {index}", DEVICE, words, replace)
    size = str(_QUICK_DISK if quick else _DISK)
    yield Probe("disk", DISK, (str(directory), size), "free or mount it, or name another place")
    larger = "give the container a larger /dev/shm (docker: --shm-size)"
    yield Probe("shared memory", DISK, ("/dev/shm", str(_LEAST_SHARED)), larger)


def run(every: Sequence[Probe], seconds: float) -> dict[Probe, Found]:
    """What all probes found: those of devices at once, as in a job, and then the others."""
    of_devices = [probe for probe in every if probe.module == DEVICE]
    others = [probe for probe in every if probe.module != DEVICE]
    found: dict[Probe, Found] = {}
    for stage in (of_devices, others):
        with ThreadPoolExecutor(max(1, len(stage))) as at_once:
            found |= zip(stage, at_once.map(lambda probe: _asked(probe, seconds), stage), strict=True)
    return found


def findings(found: Mapping[Probe, Found]) -> Iterator[Finding]:
    """A finding for each probe; a device is also held against its neighbours."""
    speeds = [each.measured["TFLOP/s"] for each in found.values() if "TFLOP/s" in each.measured]
    usual = statistics.median(speeds) if speeds else 0.0
    for probe, each in found.items():
        speed = each.measured.get("TFLOP/s", usual)
        told = ", ".join(f"{value:.3g} {unit}" for unit, value in each.measured.items())
        if each.wrong:
            yield fail(probe.subject, each.wrong, probe.fix)
        elif speed < SLOWEST * usual:
            slow = f"computes {speed:.3g} TFLOP/s, its neighbours {usual:.3g}"
            yield fail(probe.subject, slow, "look at its clocks, temperature and power; leave the node out")
        else:
            yield ok(probe.subject, told)


def _asked(probe: Probe, seconds: float) -> Found:
    command = [sys.executable, "-m", probe.module, *probe.words]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return Found(wrong=f"no answer within {seconds:.0f} s")
    if done.returncode:
        name = signal.Signals(-done.returncode).name if done.returncode < 0 else f"code {done.returncode}"
        said = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        return Found(wrong=f"its probe ended with {name}: {said[:300]}")
    return Found(**json.loads(done.stdout.splitlines()[-1]))
