"""Whether a node can do what a job will ask of it, found out by doing it: a module for each probe.

A probe is a process of its own, `python -m bundle.preflight.PROBE WORDS`, which has a time limit: a driver in
trouble never answers, and a file server late. It prints what it found as one line, `Found`, and ends with who
asks (`bundle.preflight.__main__`): what it holds, as a port, is free for the next.
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
from bundle.environment.machine import Finding, Hardware, fail, ok, spoken
from bundle.errors import LaunchUnavailable
from bundle.launch.causes import PORT_TAKEN
from bundle.launch.outcomes import node_name
from bundle.launch.rendezvous import Rendezvous
from bundle.preflight import nodes

# That the probes of devices may take together, torch's import included, and then the others.
SECONDS, QUICK_SECONDS = 300.0, 28.0
# That measuring links may take, once all nodes are there.
LINK_SECONDS, QUICK_LINK_SECONDS = 120.0, 25.0
_STARTING_SECONDS = 60.0  # beyond those, for imports and for saying what came of it
# A device that is slower than this share of its neighbours holds them all up.
SLOWEST = 0.9
DEVICE, DISK, LINKS = (f"bundle.preflight.{name}" for name in ("device", "disk", "links"))
HOST, KERNEL, RDMA, RECOVERY, VERSIONS = (
    f"bundle.preflight.{name}" for name in ("host", "kernel", "rdma", "recovery", "versions")
)
_DISK, _QUICK_DISK = 1 << 30, 1 << 26  # bytes that are written and read
_LEAST_SHARED = 1 << 28  # what NCCL and gloo need of /dev/shm, and loaders
_AFTER_KILL_SECONDS = 1.0  # that a process has to end which is told to, unless a driver holds it
_SPEED = "TFLOP/s"
_MARK = "preflight found "  # libraries print lines of their own


@dataclass(frozen=True)
class Found:
    """What a probe found: what it measured, by name and unit, and what is wrong, if anything.

    `skipped` is why nothing can be said here, `said` what else there is to say, `seconds` what it took.
    `nodes`: the names of nodes that were asked together and what is wrong with each, by their number.
    """

    measured: Mapping[str, float] = field(default_factory=dict)
    wrong: str = ""
    skipped: str = ""
    said: str = ""
    seconds: float = 0.0
    nodes: Mapping[int, tuple[str, str]] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """passed, failed or skipped."""
        return "failed" if self.wrong else "skipped" if self.skipped else "passed"

    def tell(self) -> None:
        """Prints it for who started the probe."""
        print(_MARK + json.dumps(asdict(self)), flush=True)


@dataclass(frozen=True)
class Probe:
    """What is asked of a node: its subject, the module and its words, and what to do where it fails."""

    subject: str
    module: str
    words: tuple[str, ...]
    fix: str


def probes(
    hardware: Hardware, directory: Path, *, quick: bool, devices: int | None = None
) -> Iterator[Probe]:
    """What is asked of a node with this hardware, whose runs lie in `directory`, and of `devices` devices."""
    device = capabilities.of(hardware.backend).device
    reset = (
        "look at its clocks, temperature, power and the driver's log; leave the node out until it is reset"
    )
    for index in range(devices or max(1, len(hardware.devices))):
        words = (device, str(index), "quick" if quick else "long")
        yield Probe(f"device {index}", DEVICE, words, reset)
    size = str(_QUICK_DISK if quick else _DISK)
    yield Probe("disk", DISK, (str(directory), size), "free or mount it, or name another place")
    larger = "give the container a larger /dev/shm (docker: --shm-size)"
    yield Probe("shared memory", DISK, ("/dev/shm", str(_LEAST_SHARED)), larger)
    yield Probe("host memory", HOST, (), "end what another job has left on the node")
    restart = "reset the device and start the node again, which begins the log anew, or leave it out"
    yield Probe("kernel log", KERNEL, (), restart)
    if hardware.backend == "cuda":
        yield Probe("recovery", RECOVERY, (), "do what it says before the node takes a job again")
    cables = "look at cables and subnet manager; in a container: `--device /dev/infiniband`"
    yield Probe("rdma", RDMA, (), cables)
    yield Probe("versions", VERSIONS, (hardware.backend,), "`mcore-bundle doctor` says what to do")


def run(every: Sequence[Probe], seconds: float) -> dict[Probe, Found]:
    """What all probes found: those of devices at once, as in a job, and then the others."""
    of_devices = [probe for probe in every if probe.module == DEVICE]
    others = [probe for probe in every if probe.module != DEVICE]
    found: dict[Probe, Found] = {}
    for stage in (of_devices, others):
        with ThreadPoolExecutor(max(1, len(stage))) as at_once:
            found |= zip(stage, at_once.map(lambda probe: _asked(probe, seconds), stage), strict=True)
    return found


class Asked:
    """What all probes of this node found, and what nodes that were asked together came to.

    `found` as `judged` has it; `own` is what is wrong with this node; `nodes` are the names of all, and what
    is wrong with each. Of several, node 0 leaves lists of those that pass and those that fail in `directory`.
    """

    def __init__(
        self,
        hardware: Hardware,
        directory: Path,
        where: Rendezvous,
        *,
        quick: bool,
        devices: int | None,
        wait: float,
    ) -> None:
        """Asks this node alone and then, each doing this, all of `where`.

        Raises JobFailed where the lists cannot be written, and what `together` raises.
        """
        every = list(probes(hardware, directory, quick=quick, devices=devices))
        alone = run(every, QUICK_SECONDS if quick else SECONDS)
        if capabilities.of(hardware.backend).device != "cpu":  # whose processors all ranks share
            alone = judged(alone)
        links = together(hardware, where, alone, quick=quick, devices=devices, wait=wait)
        self.found = {**alone, **links}
        self.own = "; ".join(
            f"{probe.subject}: {each.wrong}" for probe, each in self.found.items() if each.wrong
        )
        said = next((each.nodes for each in links.values() if each.nodes), {})
        self.nodes = list(said.values()) or [(node_name(), self.own)]
        if where.nodes > 1 and where.node_rank == 0 and said:
            nodes.write(directory / nodes.FOLDER, self.nodes)


def together(
    hardware: Hardware,
    where: Rendezvous,
    alone: Mapping[Probe, Found],
    *,
    quick: bool,
    devices: int | None = None,
    wait: float,
) -> dict[Probe, Found]:
    """What the links of this node's devices carry, and of all nodes of `where`, of which each calls this.

    `alone` is what was found before: a node that fails alone is measured with nobody, and says why. For nodes
    that have yet to come it waits for `wait` seconds. Nothing where there is one device. Raises
    LaunchUnavailable on node 0 where the port is taken at which the nodes meet.
    """
    per_node = devices or max(1, len(hardware.devices))
    if where.nodes * per_node == 1:
        return {}
    if where.nodes > 1 and where.node_rank == 0:
        _refuse_taken(where.port or 0)
    unfit = "; ".join(f"{probe.subject}: {each.wrong}" for probe, each in alone.items() if each.wrong)
    seconds = QUICK_LINK_SECONDS if quick else LINK_SECONDS
    fix = "look at cables, switches and the driver's log; leave the node out until then"
    with tempfile.TemporaryDirectory() as folder:
        of_devices = nodes.places(
            capabilities.of(hardware.backend).device,
            per_node,
            where,
            Path(folder) / "store",
            unfit=unfit,
            wait=wait,
            seconds=seconds,
            quick=quick,
        )
        every = [Probe(f"links of device {of.local_rank}", LINKS, (of.word,), fix) for of in of_devices]
        limit = wait + 3 * seconds + _STARTING_SECONDS
        with ThreadPoolExecutor(len(every)) as at_once:
            return dict(zip(every, at_once.map(lambda probe: _asked(probe, limit), every), strict=True))


def _refuse_taken(port: int) -> None:
    """Raises LaunchUnavailable where somebody listens, which is nothing against the node."""
    with socket.socket() as asking:  # which does not listen, so that no other node meets it
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            asking.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise LaunchUnavailable(f"port {port}: {PORT_TAKEN}") from error


def judged(found: Mapping[Probe, Found]) -> dict[Probe, Found]:
    """The same, where a device that is slower than its neighbours is wrong as well."""
    speeds = [each.measured[_SPEED] for each in found.values() if _SPEED in each.measured]
    # Of two, the faster one: the middle between them would let the other be slower.
    usual = statistics.median_high(speeds) if speeds else 0.0
    slow = {
        probe: replace(each, wrong=f"computes {speed:.3g} TFLOP/s, its neighbours {usual:.3g}")
        for probe, each in found.items()
        if not each.wrong and (speed := each.measured.get(_SPEED, usual)) < SLOWEST * usual
    }
    return {**found, **slow}


def findings(found: Mapping[Probe, Found]) -> Iterator[Finding]:
    """A finding for each probe, as `judged` has them."""
    for probe, each in found.items():
        if each.wrong:
            yield fail(probe.subject, each.wrong, probe.fix)
        elif each.skipped:
            yield ok(probe.subject, f"skipped: {each.skipped}")
        else:
            told = [f"{value:.3g} {unit}" for unit, value in each.measured.items()]
            yield ok(probe.subject, ", ".join([*told, *([each.said] if each.said else [])]))


def report(
    backend: str, found: Mapping[Probe, Found], came_to: Sequence[tuple[str, str]] = ()
) -> dict[str, Any]:
    """What a node's probes came to, as JSON can hold it; `came_to` is what is wrong with each node."""
    return {
        "schema": 1,
        "node": node_name(),
        "backend": backend,
        "passed": not any(each.wrong for each in found.values()),
        "nodes": [{"node": name, "passed": not why, "cause": why} for name, why in came_to],
        "probes": [
            {
                "name": probe.subject,
                "status": each.status,
                "seconds": each.seconds,
                "measured": dict(each.measured),
                "cause": each.wrong or each.skipped or each.said,
                "fix": probe.fix if each.wrong else "",
            }
            for probe, each in found.items()
        ],
    }


def _asked(probe: Probe, seconds: float) -> Found:
    began = time.monotonic()
    process = subprocess.Popen(
        # By the process, since a thread of it is the parent: that lives until the probe has ended.
        [sys.executable, "-m", __name__, str(os.getpid()), probe.module, *probe.words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    late = False
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        late, said = True, b""
    finally:
        _end(process)
    took = round(time.monotonic() - began, 2)
    if late:
        held = ", and its driver or the kernel does not let it end" if process.returncode is None else ""
        return Found(wrong=f"no answer within {seconds:.0f} s{held}", seconds=took)
    lines = [line for line in spoken(said).splitlines() if line.strip()]
    told = [line.removeprefix(_MARK) for line in lines if line.startswith(_MARK)]
    if told:
        values = json.loads(told[-1])
        by_number = {int(number): (name, why) for number, (name, why) in values["nodes"].items()}
        return replace(Found(**values), nodes=by_number, seconds=took)
    code = process.returncode
    name = signal.Signals(-code).name if code < 0 else f"code {code}"
    return Found(wrong=f"its probe ended with {name}: {(lines or ['nothing said'])[-1][:300]}", seconds=took)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a process; one that a driver holds is left alone: to wait for it has no end."""
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_AFTER_KILL_SECONDS)
    if process.stdout is not None:
        process.stdout.close()
