"""Checks of a node before a job, which try what the job will need: one module for each probe.

A probe is a process of its own, `python -m bundle.preflight.PROBE WORDS`. It has a time limit, as a broken
driver never answers, and a file server may answer late. It prints one line with its result, `ProbeResult`. It
ends with its starter (`bundle.preflight.__main__`), so its resources, such as a port, are free for the next
probe.
"""

import errno
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bundle import capabilities
from bundle.environment.machine import Finding, Hardware, fail, ok, to_printable
from bundle.errors import TargetUnavailable
from bundle.launch.causes import PORT_IN_USE_ADVICE
from bundle.launch.outcomes import get_node_name
from bundle.launch.rendezvous import Rendezvous
from bundle.preflight import nodes

# The time limit for the probes of all devices, with torch's import; and again for the other probes.
SECONDS, QUICK_SECONDS = 300.0, 28.0
# The time limit for measuring links, once all nodes have come.
LINK_SECONDS, QUICK_LINK_SECONDS = 120.0, 25.0
_LINK_PROBE_EXTRA_SECONDS = 60.0  # beyond those, for imports and for the report
# A device below this share of its neighbours' speed slows all of them down.
LEAST_DEVICE_SPEED_SHARE = 0.9
DEVICE, DISK, LINKS = (f"bundle.preflight.{name}" for name in ("device", "disk", "links"))
HOST, KERNEL, RDMA, RECOVERY, VERSIONS = (
    f"bundle.preflight.{name}" for name in ("host", "kernel", "rdma", "recovery", "versions")
)
_DISK_BYTES, _QUICK_DISK_BYTES = 1 << 30, 1 << 26  # bytes that are written and read
_SHARED_MEMORY_TEST_BYTES = 1 << 28  # bytes of /dev/shm that NCCL, gloo and loaders need
_KILL_WAIT_SECONDS = 1.0  # for a killed process to end, unless a driver holds it
_COMPUTE_SPEED_UNIT = "TFLOP/s"
_RESULT_PREFIX = "preflight found "  # libraries print lines of their own


@dataclass(frozen=True)
class ProbeResult:
    """The result of a probe: its measurements by name and unit, and the defect, if any.

    `skipped` is the reason why it could not run, `note` further information, and `seconds` its duration.
    `nodes` are the names and defects of nodes that were checked together, by their number.
    """

    measured: Mapping[str, float] = field(default_factory=dict)
    wrong: str = ""
    skipped: str = ""
    note: str = ""
    seconds: float = 0.0
    nodes: Mapping[int, tuple[str, str]] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """The status: passed, failed or skipped."""
        return "failed" if self.wrong else "skipped" if self.skipped else "passed"

    def print_result(self) -> None:
        """Print the result for the starter of the probe."""
        print(_RESULT_PREFIX + json.dumps(asdict(self)), flush=True)


@dataclass(frozen=True)
class Probe:
    """One check of a node: its subject, the module and its arguments, and the remedy where it fails."""

    subject: str
    module: str
    arguments: tuple[str, ...]
    fix: str


def build_node_probes(
    hardware: Hardware, directory: Path, *, quick: bool, devices: int | None = None
) -> Iterator[Probe]:
    """Yield the probes of a node with this hardware and of `devices` devices.

    Runs lie in `directory`.
    """
    device = capabilities.find_capabilities(hardware.backend).device
    reset = (
        "look at its clocks, temperature, power and driver log; leave the node out until the device is reset"
    )
    for index in range(devices or max(1, len(hardware.devices))):
        device_arguments = (device, str(index), "quick" if quick else "long")
        yield Probe(f"device {index}", DEVICE, device_arguments, reset)
    size = str(_QUICK_DISK_BYTES if quick else _DISK_BYTES)
    yield Probe("disk", DISK, (str(directory), size), "free space or mount the disk, or name another place")
    larger = "give the container a larger /dev/shm (docker: --shm-size)"
    yield Probe("shared memory", DISK, ("/dev/shm", str(_SHARED_MEMORY_TEST_BYTES)), larger)
    yield Probe("host memory", HOST, (), "end the processes that another job left on the node")
    restart = "reset the device and restart the node, which starts a new kernel log, or leave the node out"
    yield Probe("kernel log", KERNEL, (), restart)
    if hardware.backend == "cuda":
        yield Probe("recovery", RECOVERY, (), "follow its advice before the node takes another job")
    cables = "check cables and subnet manager; in a container, pass `--device /dev/infiniband`"
    yield Probe("rdma", RDMA, (), cables)
    yield Probe("versions", VERSIONS, (hardware.backend,), "run `mcore-bundle doctor` for the remedy")


def run_probes(probes: Sequence[Probe], seconds: float) -> dict[Probe, ProbeResult]:
    """Return the results of all probes.

    The probes of devices run at the same time, as in a job, and then the others.
    """
    device_probes = [probe for probe in probes if probe.module == DEVICE]
    other_probes = [probe for probe in probes if probe.module != DEVICE]
    results: dict[Probe, ProbeResult] = {}
    for stage in (device_probes, other_probes):
        with ThreadPoolExecutor(max(1, len(stage))) as at_once:
            results |= zip(stage, at_once.map(lambda probe: _run_probe(probe, seconds), stage), strict=True)
    return results


class NodeCheck:
    """The results of all probes of this node, and the defects of the nodes that were checked together.

    `results` are those of `mark_slow_devices`. `own_defects` are the defects of this node; `node_defects` are
    the names and defects of all nodes. With several nodes, node 0 writes lists of passing and failing nodes
    into `directory`.
    """

    def __init__(
        self,
        hardware: Hardware,
        directory: Path,
        rendezvous: Rendezvous,
        *,
        quick: bool,
        devices: int | None,
        wait: float,
    ) -> None:
        """Check this node alone, and then all nodes of `rendezvous` together, which all call this.

        Raise JobFailed where the lists cannot be written, and what `measure_links` raises.
        """
        node_probes = list(build_node_probes(hardware, directory, quick=quick, devices=devices))
        own_results = run_probes(node_probes, QUICK_SECONDS if quick else SECONDS)
        if (
            capabilities.find_capabilities(hardware.backend).device != "cpu"
        ):  # ranks share the processors of a cpu
            own_results = mark_slow_devices(own_results)
        link_results = measure_links(
            hardware, rendezvous, own_results, quick=quick, devices=devices, wait=wait
        )
        self.results = {**own_results, **link_results}
        self.own_defects = "; ".join(
            f"{probe.subject}: {result.wrong}" for probe, result in self.results.items() if result.wrong
        )
        defects_by_node = next((result.nodes for result in link_results.values() if result.nodes), {})
        self.node_defects = list(defects_by_node.values()) or [(get_node_name(), self.own_defects)]
        if rendezvous.nodes > 1 and rendezvous.node_rank == 0 and defects_by_node:
            nodes.write_node_lists(directory / nodes.PREFLIGHT_FOLDER, self.node_defects)


def measure_links(
    hardware: Hardware,
    rendezvous: Rendezvous,
    own_results: Mapping[Probe, ProbeResult],
    *,
    quick: bool,
    devices: int | None = None,
    wait: float,
) -> dict[Probe, ProbeResult]:
    """Measure the links between this node's devices, and between all nodes of `rendezvous`.

    Each node calls this. `own_results` are the earlier results: a node that failed alone takes no part and
    reports the reason. `wait` is the limit for the other nodes to come [s]. Return nothing for a single
    device. Raise TargetUnavailable on node 0 where the port is taken at which the nodes meet.
    """
    per_node = devices or max(1, len(hardware.devices))
    if rendezvous.nodes * per_node == 1:
        return {}
    if rendezvous.nodes > 1 and rendezvous.node_rank == 0:
        _refuse_taken_port(rendezvous.port or 0)
    unfit = "; ".join(
        f"{probe.subject}: {result.wrong}" for probe, result in own_results.items() if result.wrong
    )
    seconds = QUICK_LINK_SECONDS if quick else LINK_SECONDS
    fix = "check cables, switches and driver log; leave the node out until then"
    with tempfile.TemporaryDirectory() as folder:
        workers = nodes.describe_link_workers(
            capabilities.find_capabilities(hardware.backend).device,
            per_node,
            rendezvous,
            Path(folder) / "store",
            unfit=unfit,
            wait=wait,
            seconds=seconds,
            quick=quick,
        )
        link_probes = [
            Probe(f"links of device {worker.local_rank}", LINKS, (worker.argument,), fix)
            for worker in workers
        ]
        limit = wait + 3 * seconds + _LINK_PROBE_EXTRA_SECONDS
        with ThreadPoolExecutor(len(link_probes)) as at_once:
            return dict(
                zip(
                    link_probes, at_once.map(lambda probe: _run_probe(probe, limit), link_probes), strict=True
                )
            )


def _refuse_taken_port(port: int) -> None:
    """Raise TargetUnavailable where the port is in use, which is not a defect of the node."""
    with socket.socket() as asking:  # it does not listen, so no other node connects to it
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            asking.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise TargetUnavailable(f"port {port}: {PORT_IN_USE_ADVICE}") from error


def mark_slow_devices(results: Mapping[Probe, ProbeResult]) -> dict[Probe, ProbeResult]:
    """Return the results, with a defect for each device that is slower than its neighbours."""
    speeds = [
        result.measured[_COMPUTE_SPEED_UNIT]
        for result in results.values()
        if _COMPUTE_SPEED_UNIT in result.measured
    ]
    # The faster of two devices counts, as their mean would hide a slow one.
    usual = statistics.median_high(speeds) if speeds else 0.0
    slow = {
        probe: replace(
            result, wrong=f"this device reaches {speed:.3g} TFLOP/s, but the other devices reach {usual:.3g}"
        )
        for probe, result in results.items()
        if not result.wrong
        and (speed := result.measured.get(_COMPUTE_SPEED_UNIT, usual)) < LEAST_DEVICE_SPEED_SHARE * usual
    }
    return {**results, **slow}


def build_findings(results: Mapping[Probe, ProbeResult]) -> Iterator[Finding]:
    """Yield a finding for each probe, from results of `mark_slow_devices`."""
    for probe, result in results.items():
        if result.wrong:
            yield fail(probe.subject, result.wrong, probe.fix)
        elif result.skipped:
            yield ok(probe.subject, f"skipped: {result.skipped}")
        else:
            measurements = [f"{value:.3g} {unit}" for unit, value in result.measured.items()]
            yield ok(probe.subject, ", ".join([*measurements, *([result.note] if result.note else [])]))


def build_report(
    backend: str, results: Mapping[Probe, ProbeResult], node_defects: Sequence[tuple[str, str]] = ()
) -> dict[str, Any]:
    """Return the results of a node's probes as JSON values; `node_defects` are all nodes' defects."""
    return {
        "schema": 1,
        "node": get_node_name(),
        "backend": backend,
        "passed": not any(result.wrong for result in results.values()),
        "nodes": [{"node": name, "passed": not defect, "cause": defect} for name, defect in node_defects],
        "probes": [
            {
                "name": probe.subject,
                "status": result.status,
                "seconds": result.seconds,
                "measured": dict(result.measured),
                "cause": result.wrong or result.skipped or result.note,
                "fix": probe.fix if result.wrong else "",
            }
            for probe, result in results.items()
        ],
    }


def _run_probe(probe: Probe, seconds: float) -> ProbeResult:
    began = time.monotonic()
    process = subprocess.Popen(
        # The parent is a thread of this process, which lives until the probe has ended.
        [sys.executable, "-m", __name__, str(os.getpid()), probe.module, *probe.arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    is_late = False
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        is_late, output = True, b""
    finally:
        _kill_and_wait_briefly(process)
    elapsed = round(time.monotonic() - began, 2)
    if is_late:
        hint = ", and its driver or the kernel blocks its end" if process.returncode is None else ""
        return ProbeResult(wrong=f"no answer within {seconds:.0f} s{hint}", seconds=elapsed)
    lines = [line for line in to_printable(output).splitlines() if line.strip()]
    result_lines = [line.removeprefix(_RESULT_PREFIX) for line in lines if line.startswith(_RESULT_PREFIX)]
    if result_lines:
        values = json.loads(result_lines[-1])
        by_number = {int(number): (name, defect) for number, (name, defect) in values["nodes"].items()}
        return replace(ProbeResult(**values), nodes=by_number, seconds=elapsed)
    code = process.returncode
    name = signal.Signals(-code).name if code < 0 else f"code {code}"
    return ProbeResult(
        wrong=f"its probe ended with {name}: {(lines or ['nothing said'])[-1][:300]}", seconds=elapsed
    )


def _kill_and_wait_briefly(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process; do not wait for a process that a driver holds, as that may never end."""
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_WAIT_SECONDS)
    if process.stdout is not None:
        process.stdout.close()
