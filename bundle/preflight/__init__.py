"""Whether a node can do what a job will ask of it, found out by doing it: a module for each probe.

A probe is a process of its own, `python -m bundle.preflight.PROBE WORDS`, which has a time limit: a driver in
trouble never answers, and a file server late. It prints what it found as one line, `ProbeResult`, and ends
with who asks (`bundle.preflight.__main__`): what it holds, as a port, is free for the next.
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
from bundle.errors import LaunchUnavailable
from bundle.launch.causes import PORT_TAKEN
from bundle.launch.outcomes import get_node_name
from bundle.launch.rendezvous import Rendezvous
from bundle.preflight import nodes

# That the probes of devices may take together, torch's import included, and then the others.
SECONDS, QUICK_SECONDS = 300.0, 28.0
# That measuring links may take, once all nodes are there.
LINK_SECONDS, QUICK_LINK_SECONDS = 120.0, 25.0
_STARTING_SECONDS = 60.0  # beyond those, for imports and for saying what came of it
# A device that is slower than this share of its neighbours holds them all up.
LEAST_SPEED_SHARE = 0.9
DEVICE, DISK, LINKS = (f"bundle.preflight.{name}" for name in ("device", "disk", "links"))
HOST, KERNEL, RDMA, RECOVERY, VERSIONS = (
    f"bundle.preflight.{name}" for name in ("host", "kernel", "rdma", "recovery", "versions")
)
_DISK_BYTES, _QUICK_DISK_BYTES = 1 << 30, 1 << 26  # bytes that are written and read
_LEAST_SHARED_BYTES = 1 << 28  # what NCCL and gloo need of /dev/shm, and loaders
_AFTER_KILL_SECONDS = 1.0  # that a process has to end which is told to, unless a driver holds it
_SPEED_UNIT = "TFLOP/s"
_RESULT_PREFIX = "preflight found "  # libraries print lines of their own


@dataclass(frozen=True)
class ProbeResult:
    """What a probe found: what it measured, by name and unit, and what is wrong, if anything.

    `skipped` is why nothing can be said here, `note` what else there is to say, `seconds` what it took.
    `nodes`: the names of nodes that were asked together and what is wrong with each, by their number.
    """

    measured: Mapping[str, float] = field(default_factory=dict)
    wrong: str = ""
    skipped: str = ""
    note: str = ""
    seconds: float = 0.0
    nodes: Mapping[int, tuple[str, str]] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """passed, failed or skipped."""
        return "failed" if self.wrong else "skipped" if self.skipped else "passed"

    def print_result(self) -> None:
        """Prints it for who started the probe."""
        print(_RESULT_PREFIX + json.dumps(asdict(self)), flush=True)


@dataclass(frozen=True)
class Probe:
    """What is asked of a node: its subject, the module and its words, and what to do where it fails."""

    subject: str
    module: str
    arguments: tuple[str, ...]
    fix: str


def build_probes(
    hardware: Hardware, directory: Path, *, quick: bool, devices: int | None = None
) -> Iterator[Probe]:
    """What is asked of a node with this hardware, whose runs lie in `directory`, and of `devices` devices."""
    device = capabilities.find_capabilities(hardware.backend).device
    reset = (
        "look at its clocks, temperature, power and the driver's log; leave the node out until it is reset"
    )
    for index in range(devices or max(1, len(hardware.devices))):
        device_arguments = (device, str(index), "quick" if quick else "long")
        yield Probe(f"device {index}", DEVICE, device_arguments, reset)
    size = str(_QUICK_DISK_BYTES if quick else _DISK_BYTES)
    yield Probe("disk", DISK, (str(directory), size), "free or mount it, or name another place")
    larger = "give the container a larger /dev/shm (docker: --shm-size)"
    yield Probe("shared memory", DISK, ("/dev/shm", str(_LEAST_SHARED_BYTES)), larger)
    yield Probe("host memory", HOST, (), "end what another job has left on the node")
    restart = "reset the device and start the node again, which begins the log anew, or leave it out"
    yield Probe("kernel log", KERNEL, (), restart)
    if hardware.backend == "cuda":
        yield Probe("recovery", RECOVERY, (), "do what it says before the node takes a job again")
    cables = "look at cables and subnet manager; in a container: `--device /dev/infiniband`"
    yield Probe("rdma", RDMA, (), cables)
    yield Probe("versions", VERSIONS, (hardware.backend,), "`mcore-bundle doctor` says what to do")


def run(probes: Sequence[Probe], seconds: float) -> dict[Probe, ProbeResult]:
    """What all probes found: those of devices at once, as in a job, and then the others."""
    device_probes = [probe for probe in probes if probe.module == DEVICE]
    other_probes = [probe for probe in probes if probe.module != DEVICE]
    results: dict[Probe, ProbeResult] = {}
    for stage in (device_probes, other_probes):
        with ThreadPoolExecutor(max(1, len(stage))) as at_once:
            results |= zip(stage, at_once.map(lambda probe: _run_probe(probe, seconds), stage), strict=True)
    return results


class NodeCheck:
    """What all probes of this node found, and what nodes that were asked together came to.

    `results` as `mark_slow_devices` has it; `own_defects` is what is wrong with this node; `nodes` are the
    names of all, and what is wrong with each. Of several, node 0 leaves lists of those that pass and those
    that fail in `directory`.
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
        """Asks this node alone and then, each doing this, all of `rendezvous`.

        Raises JobFailed where the lists cannot be written, and what `measure_links` raises.
        """
        node_probes = list(build_probes(hardware, directory, quick=quick, devices=devices))
        own_results = run(node_probes, QUICK_SECONDS if quick else SECONDS)
        if (
            capabilities.find_capabilities(hardware.backend).device != "cpu"
        ):  # whose processors all ranks share
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
            nodes.write(directory / nodes.FOLDER, self.node_defects)


def measure_links(
    hardware: Hardware,
    rendezvous: Rendezvous,
    own_results: Mapping[Probe, ProbeResult],
    *,
    quick: bool,
    devices: int | None = None,
    wait: float,
) -> dict[Probe, ProbeResult]:
    """What the links of this node's devices, and of all nodes of `rendezvous`, carry. Each node calls this.

    `own_results` is what was found before: a node that fails alone is measured with nobody, and says why. For
    nodes that have yet to come it waits for `wait` seconds. Nothing where there is one device. Raises
    LaunchUnavailable on node 0 where the port is taken at which the nodes meet.
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
    fix = "look at cables, switches and the driver's log; leave the node out until then"
    with tempfile.TemporaryDirectory() as folder:
        workers = nodes.build_workers(
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
        limit = wait + 3 * seconds + _STARTING_SECONDS
        with ThreadPoolExecutor(len(link_probes)) as at_once:
            return dict(
                zip(
                    link_probes, at_once.map(lambda probe: _run_probe(probe, limit), link_probes), strict=True
                )
            )


def _refuse_taken_port(port: int) -> None:
    """Raises LaunchUnavailable where somebody listens, which is nothing against the node."""
    with socket.socket() as asking:  # which does not listen, so that no other node meets it
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            asking.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise LaunchUnavailable(f"port {port}: {PORT_TAKEN}") from error


def mark_slow_devices(results: Mapping[Probe, ProbeResult]) -> dict[Probe, ProbeResult]:
    """The same, where a device that is slower than its neighbours is wrong as well."""
    speeds = [result.measured[_SPEED_UNIT] for result in results.values() if _SPEED_UNIT in result.measured]
    # Of two, the faster one: the middle between them would let the other be slower.
    usual = statistics.median_high(speeds) if speeds else 0.0
    slow = {
        probe: replace(result, wrong=f"computes {speed:.3g} TFLOP/s, its neighbours {usual:.3g}")
        for probe, result in results.items()
        if not result.wrong and (speed := result.measured.get(_SPEED_UNIT, usual)) < LEAST_SPEED_SHARE * usual
    }
    return {**results, **slow}


def build_findings(results: Mapping[Probe, ProbeResult]) -> Iterator[Finding]:
    """A finding for each probe, as `mark_slow_devices` has them."""
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
    """What a node's probes came to, as JSON can hold it; `node_defects` is what is wrong with each node."""
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
        # By the process, since a thread of it is the parent: that lives until the probe has ended.
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
        _end_process(process)
    elapsed = round(time.monotonic() - began, 2)
    if is_late:
        hint = ", and its driver or the kernel does not let it end" if process.returncode is None else ""
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


def _end_process(process: "subprocess.Popen[bytes]") -> None:
    """Ends a process; one that a driver holds is left alone: to wait for it has no end."""
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_AFTER_KILL_SECONDS)
    if process.stdout is not None:
        process.stdout.close()
