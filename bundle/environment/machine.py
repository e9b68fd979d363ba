"""What a machine is, as values that carry the reason we believe them, and what `doctor` finds about it.

Everything that detection may touch is a root directory, an environment and a command runner. A vendor's tool
is asked within limits: a driver in trouble keeps its tool silent for minutes, or talking.
"""

import dataclasses
import logging
import math
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar

from bundle import files

T = TypeVar("T")

# Of one machine. What lists more than that is not telling the truth, and pairs of devices are compared.
MOST_DEVICES = 1024
# A number that a tool or a file says: no count or size has more digits, and Python reads no endless ones.
MOST_DIGITS = 18
NUMBER = rf"\d{{1,{MOST_DIGITS}}}"

# MindSpeed's install guide names Atlas A2 and A3 training products and Ascend 950, and no others.
NOT_FOR_TRAINING = {"310": "an inference card", "a1": "older than anything that MindSpeed supports"}


@dataclass(frozen=True)
class Fact(Generic[T]):
    """A value and where it was read; `value` None means unknown, and `reason` says why."""

    value: T | None
    reason: str

    def __str__(self) -> str:
        return f"{'unknown' if self.value is None else self.value} ({self.reason})"


@dataclass(frozen=True)
class Device:
    """One accelerator as a process sees it: the framework calls it `index`, the driver `number`."""

    index: int
    number: int
    name: str
    identity: str  # UUID or bus id
    memory: Fact[int]  # bytes
    generation: Fact[str]  # CUDA: the compute capability, "9.0"; Ascend: a1, a2, a3, a5 or 310


class Selection(NamedTuple):
    """What a visibility variable leaves of a vendor's devices, by that vendor's own rules.

    `chosen` are positions in the order a framework counts them; `fault` if the driver refuses the value.
    """

    chosen: tuple[int, ...]
    reason: str
    fault: str | None = None

    @classmethod
    def of_list(cls, shown: str, entries: Sequence[str], chosen: Sequence[int], unknown: str) -> Self:
        """What a list of devices leaves, which ends at the first entry that is `unknown`."""
        if len(chosen) < len(entries):
            shown += f": the list ends at {entries[len(chosen)][:80]!r}, which {unknown}"
        return cls(tuple(chosen), shown)


class VendorDevices(NamedTuple):
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


class Host(NamedTuple):
    """What this process may use beside the devices; sizes in bytes, `math.inf` means unlimited."""

    processors: Fact[float]
    memory: Fact[float]
    shared_memory: Fact[float]
    locked_memory: Fact[float]
    open_files: Fact[float]
    stack: Fact[float]


class Hardware(NamedTuple):
    """The machine: the backend it calls for and why, the visible devices, the links, the host's limits."""

    backend: str  # cuda, ascend or cpu
    reason: str
    devices: tuple[Device, ...]
    driver: Fact[str]
    toolkit: Fact[str]  # CANN on Ascend; what the driver supports is all that CUDA tells
    link: Fact[str]  # the weakest link between two visible devices: NV18, HCCS, PHB ...
    rdma: Fact[tuple[str, ...]]  # the active ports
    host: Host
    notes: tuple[str, ...] = ()  # what is odd, though not wrong

    @property
    def device_memory(self) -> Fact[int]:
        """Bytes of the smallest visible device: what a rank can count on."""
        sizes = [device.memory for device in self.devices]
        if not sizes:
            return Fact(None, "no accelerator: ranks share the host's memory")
        return min(sizes, key=lambda size: -1 if size.value is None else size.value)

    @property
    def generation(self) -> Fact[str]:
        """The oldest generation among the visible devices, as `Device.generation` spells it."""
        known = [device.generation for device in self.devices]
        if not known:
            return Fact(None, "no accelerator")
        return min(known, key=lambda fact: _order(fact.value))

    @property
    def unfit(self) -> str | None:
        """Why these devices cannot train at all; None where they can."""
        why = NOT_FOR_TRAINING.get(self.generation.value or "")
        if why is None:
            return None
        return f"{self.devices[0].name} is {why}: use Atlas A2, A3 or Ascend 950 devices"

    @property
    def capability(self) -> tuple[int, int] | None:
        """(major, minor) of the CUDA compute capability that all visible devices have; None if unknown."""
        if self.backend != "cuda" or self.generation.value is None:
            return None
        major, minor = self.generation.value.split(".")
        return int(major), int(minor)


def _order(generation: str | None) -> tuple[float, str]:
    if generation is None:
        return (-1.0, "")
    return (float(generation), "") if generation[0].isdigit() else (0.0, generation)


def assignment(name: str, value: str) -> str:
    """A variable and its value, as a message quotes them."""
    return f"{name}={value}" if len(value) <= 200 else f"{name}={value[:200]}..."


class Level(StrEnum):
    """How bad it is; only `fail` makes the environment unfit."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(NamedTuple):
    """What was found about `subject`; `fix` is empty where nothing is to be done."""

    subject: str
    level: Level
    cause: str
    fix: str = ""


def ok(subject: str, cause: str) -> Finding:
    """A finding that needs nothing."""
    return Finding(subject, Level.OK, cause)


def warn(subject: str, cause: str, fix: str) -> Finding:
    """A finding that will slow a job down or break some jobs."""
    return Finding(subject, Level.WARN, cause, fix)


def fail(subject: str, cause: str, fix: str) -> Finding:
    """A finding that no job survives."""
    return Finding(subject, Level.FAIL, cause, fix)


def plain(value: Any) -> Any:
    """The value as JSON can hold it: records as objects, other tuples as lists, infinity as "unlimited"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):  # a NamedTuple
        return plain(value._asdict())
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    if isinstance(value, float) and math.isinf(value):
        return "unlimited"
    return value


_log = logging.getLogger(__name__)

Run = Callable[[Sequence[str]], Fact[str]]

# The mounts of a busy Kubernetes node are the longest text that is read: some hundred kilobytes.
LARGEST_FILE = 2**22
# A healthy tool answers in well under a second, with some hundred bytes for each device.
SECONDS = 10.0
MOST_BYTES = 2**20
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CONTROLS = re.compile(r"[^\S\n\t ]|[\x00-\x08\x0e-\x1f\x7f-\x9f]")


class Machine(NamedTuple):
    """A machine to look at: the real one, or a directory and recorded answers that stand for one."""

    root: Path
    environ: Mapping[str, str]
    run: Run

    def read(self, path: str) -> Fact[str]:
        """The text of the file at the absolute `path` under the root, or why there is none."""
        try:
            data = files.content(self.root / path.lstrip("/"), LARGEST_FILE)
            return Fact(data.decode(errors="replace"), path)
        except OSError as error:
            return Fact(None, f"{path}: {error.strerror}")

    def names(self, directory: str) -> tuple[str, ...]:
        """The sorted names in a directory; none if it does not exist or may not be read."""
        try:
            return tuple(sorted(entry.name for entry in (self.root / directory.lstrip("/")).iterdir()))
        except (OSError, ValueError):  # not there, not ours to read, or no name at all
            return ()


def local() -> Machine:
    """The machine this process runs on."""
    return Machine(Path("/"), os.environ, run_command)


def run_command(command: Sequence[str]) -> Fact[str]:
    """The command's output, or why there is none: missing, failed, no end of words, or no answer in time."""
    shown, begun = " ".join(command), time.monotonic()
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )
    except FileNotFoundError:
        return Fact(None, f"{command[0]} is not on PATH")
    except OSError as error:
        return Fact(None, f"`{shown}`: {error}")
    try:
        out, err = _hear(process, begun + SECONDS)
        status = process.wait(SECONDS)
    except (TimeoutError, subprocess.TimeoutExpired):
        return Fact(None, f"`{shown}` timed out after {SECONDS:g} seconds")
    except OverflowError:
        return Fact(None, f"`{shown}` said more than {MOST_BYTES} bytes")
    finally:
        _end(process)
        _log.debug("`%s` was asked: %.2f seconds", shown, time.monotonic() - begun)
    if status:
        said = (err or out).strip().splitlines()
        return Fact(None, f"`{shown}` ended with {status}: {said[0][:500] if said else 'it said nothing'}")
    return Fact(out, f"`{shown}`")


def _hear(process: subprocess.Popen[bytes], deadline: float) -> tuple[str, str]:
    """What the process writes to its two streams. Raises TimeoutError or OverflowError past a limit."""
    heard = {process.stdout: bytearray(), process.stderr: bytearray()}
    with selectors.DefaultSelector() as open_streams:
        for stream in heard:
            assert stream is not None
            open_streams.register(stream, selectors.EVENT_READ)
        while open_streams.get_map():
            ready = open_streams.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                piece = os.read(key.fd, 2**16)
                heard[key.fileobj] += piece  # type: ignore[index]  # the streams registered above
                if not piece:
                    open_streams.unregister(key.fileobj)
                elif sum(map(len, heard.values())) > MOST_BYTES:
                    raise OverflowError
    out, err = (spoken(said) for said in heard.values())
    return out, err


def spoken(said: bytes | bytearray) -> str:
    """Lines of printable characters: what a tool says is shown on terminals."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", _COLOURS.sub("", said.decode(errors="replace")))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process, and what it started, unless it has ended; one that the driver holds is left alone."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(1.0)


# From the weakest up, as both tools' legends define them; NV<n> (NVLink lanes) ranks above by n.
_RANKS = ("NA", "SYS", "NODE", "PHB", "PXB", "PIX", "HCCS_SW", "HCCS", "SIO")


def weakest(machine: Machine, tool: Sequence[str], prefix: str, numbers: Sequence[int]) -> Fact[str]:
    """The weakest link between two of the devices `numbers`, in the matrix of `<prefix><number>` rows that
    the tool prints.
    """
    if len(numbers) < 2:
        return Fact(None, "one device has no link to another")
    matrix = machine.run(tool)
    if matrix.value is None:
        return Fact(None, matrix.reason)
    table = _matrix(matrix.value, prefix)
    pairs = [table.get((a, b)) for a, b in combinations(numbers, 2)]
    known = [link for link in pairs if link is not None]
    if not known:
        return Fact(None, f"{matrix.reason}: no matrix of {prefix} rows in the answer")
    return Fact(min(known, key=_strength), f"{matrix.reason}: the weakest of {len(known)} pairs")


def _matrix(text: str, prefix: str) -> dict[tuple[int, int], str]:
    columns: list[int] = []
    links: dict[tuple[int, int], str] = {}
    for line in text.splitlines():
        words = line.split()
        numbers = [int(word[len(prefix) :]) for word in words if re.fullmatch(prefix + NUMBER, word)]
        if len(numbers) > 1:
            columns = numbers  # the header names every device, a row only its own
        elif numbers:
            for column, link in zip(columns, words[1:], strict=False):
                links[numbers[0], column] = link
    return links


def _strength(link: str) -> int:
    if match := re.fullmatch(rf"NV({NUMBER})", link):
        return 100 + int(match[1])
    return _RANKS.index(link) if link in _RANKS else 0
