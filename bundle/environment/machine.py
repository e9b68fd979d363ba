"""Facts about a machine, each with the place where it was read, and the findings of `doctor`.

Detection uses a root directory, an environment and a command runner, and nothing else. A vendor's tool runs
within limits, because a faulty driver can keep its tool silent for minutes or printing without end.
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

# Devices of one machine. A longer list is wrong, and pairs of devices are compared.
MOST_DEVICES = 1024
# Digits of a number in a tool's output or a file: no count or size has more, and Python limits the length.
MOST_DIGITS = 18
NUMBER_PATTERN = rf"\d{{1,{MOST_DIGITS}}}"

# MindSpeed's install guide names Atlas A2 and A3 training products and Ascend 950, and no others.
UNTRAINABLE_GENERATION_REASONS = {
    "310": "an inference card",
    "a1": "older than anything that MindSpeed supports",
}


@dataclass(frozen=True)
class DetectedValue(Generic[T]):
    """A value and where it was read; `value` None means unknown, and `reason` says why."""

    value: T | None
    reason: str

    def __str__(self) -> str:
        return f"{'unknown' if self.value is None else self.value} ({self.reason})"


@dataclass(frozen=True)
class Accelerator:
    """One accelerator as a process sees it: the framework calls it `index`, the driver `number`."""

    index: int
    number: int
    name: str
    identity: str  # UUID or bus id
    memory: DetectedValue[int]  # bytes
    generation: DetectedValue[str]  # CUDA: the compute capability, "9.0"; Ascend: a1, a2, a3, a5 or 310


class Selection(NamedTuple):
    """The devices of a vendor that a visibility variable leaves, by the rules of that vendor.

    `chosen` are positions in the order in which a framework counts them; `fault` is set if the driver refuses
    the value.
    """

    chosen: tuple[int, ...]
    reason: str
    fault: str | None = None

    @classmethod
    def from_list(cls, shown: str, entries: Sequence[str], chosen: Sequence[int], unknown: str) -> Self:
        """Return the selection of a list of devices, which ends at the first entry that is `unknown`."""
        if len(chosen) < len(entries):
            ending = f": {entries[len(chosen)][:80]!r} {unknown}, so the list ends before it"
            shown = shown.removesuffix("=") + " is empty" if list(entries) == [""] else shown + ending
        return cls(tuple(chosen), shown)


class VendorDevices(NamedTuple):
    """One vendor's devices: `present` in this container, of which `devices` are visible, and why."""

    backend: str
    noun: str  # "GPU", "NPU"
    present: int
    devices: tuple[Accelerator, ...]
    reason: str
    driver: DetectedValue[str]
    toolkit: DetectedValue[str]
    link: DetectedValue[str]
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Host(NamedTuple):
    """The limits of this process besides the devices; sizes in bytes, `math.inf` means unlimited.

    `open_files` is the hard limit, to which the launcher raises the soft one.
    """

    processors: DetectedValue[float]
    memory: DetectedValue[float]
    shared_memory: DetectedValue[float]
    locked_memory: DetectedValue[float]
    open_files: DetectedValue[float]
    stack: DetectedValue[float]


class Hardware(NamedTuple):
    """The machine: the backend it calls for and why, the visible devices, the links, the host's limits."""

    backend: str  # cuda, ascend or cpu
    reason: str
    devices: tuple[Accelerator, ...]
    driver: DetectedValue[str]
    toolkit: DetectedValue[str]  # CANN on Ascend; what the driver supports is all that CUDA tells
    link: DetectedValue[str]  # the weakest link between two visible devices: NV18, HCCS, PHB ...
    rdma: DetectedValue[tuple[str, ...]]  # the active ports
    host: Host
    notes: tuple[str, ...] = ()  # what is odd, though not wrong

    @property
    def smallest_device_memory(self) -> DetectedValue[int]:
        """Bytes of the smallest visible device, on which every rank can count."""
        sizes = [device.memory for device in self.devices]
        if not sizes:
            return DetectedValue(None, "no accelerator: ranks share the host's memory")
        return min(sizes, key=lambda size: -1 if size.value is None else size.value)

    @property
    def oldest_generation(self) -> DetectedValue[str]:
        """The oldest generation among the visible devices, as `Accelerator.generation` spells it."""
        known = [device.generation for device in self.devices]
        if not known:
            return DetectedValue(None, "no accelerator")
        return min(known, key=lambda fact: _rank_generation(fact.value))

    @property
    def unfit_reason(self) -> str | None:
        """The reason why these devices cannot train; None where they can."""
        reason = UNTRAINABLE_GENERATION_REASONS.get(self.oldest_generation.value or "")
        if reason is None:
            return None
        return f"{self.devices[0].name} is {reason}. Use Atlas A2, A3 or Ascend 950 devices"

    @property
    def capability(self) -> tuple[int, int] | None:
        """(major, minor) of the CUDA compute capability that all visible devices have; None if unknown."""
        if self.backend != "cuda" or self.oldest_generation.value is None:
            return None
        major, minor = self.oldest_generation.value.split(".")
        return int(major), int(minor)


def _rank_generation(generation: str | None) -> tuple[float, str]:
    if generation is None:
        return (-1.0, "")
    return (float(generation), "") if generation[0].isdigit() else (0.0, generation)


def format_short_assignment(name: str, value: str) -> str:
    """Return a variable and its value, as a message quotes them."""
    return f"{name}={value}" if len(value) <= 200 else f"{name}={value[:200]}..."


class Level(StrEnum):
    """The severity of a finding; only `fail` makes the environment unfit."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(NamedTuple):
    """A finding about `subject`; `fix` is empty where nothing has to be done."""

    subject: str
    level: Level
    cause: str
    fix: str = ""


def ok(subject: str, cause: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(subject, Level.OK, cause)


def warn(subject: str, cause: str, fix: str) -> Finding:
    """Return a finding that slows a job down or breaks some jobs."""
    return Finding(subject, Level.WARN, cause, fix)


def fail(subject: str, cause: str, fix: str) -> Finding:
    """Return a finding with which no job can run."""
    return Finding(subject, Level.FAIL, cause, fix)


def to_json_value(value: Any) -> Any:
    """Return the value in a form that JSON can hold.

    Records become objects, other tuples lists, and infinity "unlimited".
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_json_value(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):  # a NamedTuple
        return to_json_value(value._asdict())
    if isinstance(value, dict):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [
            to_json_value(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value)
        ]
    if isinstance(value, float) and math.isinf(value):
        return "unlimited"
    return value


_log = logging.getLogger(__name__)

CommandRunner = Callable[[Sequence[str]], DetectedValue[str]]

# The mounts of a busy Kubernetes node are the longest text that is read: some hundred kilobytes.
LARGEST_FILE = 2**22
# A healthy tool answers in well under a second, with some hundred bytes for each device.
TIMEOUT_SECONDS = 10.0
MOST_OUTPUT_BYTES = 2**20
_COLOUR_CODES = re.compile(r"\x1b\[[0-9;]*m")
_CONTROL_CHARACTERS = re.compile(r"[^\S\n\t ]|[\x00-\x08\x0e-\x1f\x7f-\x9f]")


class Machine(NamedTuple):
    """A machine to examine: the real one, or a directory and recorded answers that stand for one."""

    root: Path
    environ: Mapping[str, str]
    run: CommandRunner

    def read(self, path: str) -> DetectedValue[str]:
        """Return the text of the file at the absolute `path` under the root, or why there is none."""
        try:
            data = files.read_content(self.root / path.lstrip("/"), LARGEST_FILE)
            return DetectedValue(data.decode(errors="replace"), path)
        except OSError as error:
            return DetectedValue(None, f"{path}: {error.strerror}")

    def list_names(self, directory: str) -> tuple[str, ...]:
        """Return the sorted names in a directory; none if it does not exist or may not be read."""
        try:
            return tuple(sorted(entry.name for entry in (self.root / directory.lstrip("/")).iterdir()))
        except (OSError, ValueError):  # not there, not ours to read, or no name at all
            return ()


def build_local_machine() -> Machine:
    """Return the machine that this process runs on."""
    return Machine(Path("/"), os.environ, run_command)


def run_command(command: Sequence[str]) -> DetectedValue[str]:
    """Return the command's output, or why there is none: missing, failed, too much output, or timed out."""
    shown, start_time = " ".join(command), time.monotonic()
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
        return DetectedValue(None, f"{command[0]} is not on PATH")
    except OSError as error:
        return DetectedValue(None, f"`{shown}`: {error}")
    try:
        out, err = _read_stdout_stderr(process, start_time + TIMEOUT_SECONDS)
        status = process.wait(TIMEOUT_SECONDS)
    except (TimeoutError, subprocess.TimeoutExpired):
        return DetectedValue(None, f"`{shown}` timed out after {TIMEOUT_SECONDS:g} seconds")
    except OverflowError:
        return DetectedValue(None, f"`{shown}` printed more than {MOST_OUTPUT_BYTES} bytes")
    finally:
        _kill_process(process)
        _log.debug("ran `%s`: %.2f seconds", shown, time.monotonic() - start_time)
    if status:
        lines = (err or out).strip().splitlines()
        return DetectedValue(
            None, f"`{shown}` ended with {status}: {lines[0][:500] if lines else 'no output'}"
        )
    return DetectedValue(out, f"`{shown}`")


def _read_stdout_stderr(process: subprocess.Popen[bytes], deadline: float) -> tuple[str, str]:
    """Return the text of the process's two streams. Raise TimeoutError or OverflowError past a limit."""
    buffers = {process.stdout: bytearray(), process.stderr: bytearray()}
    with selectors.DefaultSelector() as open_streams:
        for stream in buffers:
            assert stream is not None
            open_streams.register(stream, selectors.EVENT_READ)
        while open_streams.get_map():
            ready = open_streams.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                piece = os.read(key.fd, 2**16)
                buffers[key.fileobj] += piece  # type: ignore[index]  # the streams registered above
                if not piece:
                    open_streams.unregister(key.fileobj)
                elif sum(map(len, buffers.values())) > MOST_OUTPUT_BYTES:
                    raise OverflowError
    out, err = (to_printable(output) for output in buffers.values())
    return out, err


def to_printable(output: bytes | bytearray) -> str:
    """Return the output as lines of printable characters, because it is shown on terminals."""
    return _CONTROL_CHARACTERS.sub(
        "\N{REPLACEMENT CHARACTER}", _COLOUR_CODES.sub("", output.decode(errors="replace"))
    )


def _kill_process(process: subprocess.Popen[bytes]) -> None:
    """End the process and what it started, unless it has ended; one that the driver blocks is left alone."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(1.0)


# Links, the weakest first, as both tools' legends define them; NV<n> (NVLink lanes) ranks above by n.
_LINKS_WEAKEST_FIRST = ("NA", "SYS", "NODE", "PHB", "PXB", "PIX", "HCCS_SW", "HCCS", "SIO")


def find_weakest_link(
    machine: Machine, command: Sequence[str], prefix: str, numbers: Sequence[int]
) -> DetectedValue[str]:
    """Return the weakest link between two of the devices `numbers`.

    The links are read from the matrix of `<prefix><number>` rows that the tool prints.
    """
    if len(numbers) < 2:
        return DetectedValue(None, "a single device has no links")
    matrix = machine.run(command)
    if matrix.value is None:
        return DetectedValue(None, matrix.reason)
    table = _parse_link_matrix(matrix.value, prefix)
    pairs = [table.get((a, b)) for a, b in combinations(numbers, 2)]
    known = [link for link in pairs if link is not None]
    if not known:
        return DetectedValue(None, f"{matrix.reason}: no matrix of {prefix} rows in the output")
    return DetectedValue(min(known, key=_rank_link), f"{matrix.reason}: the weakest of {len(known)} pairs")


def _parse_link_matrix(text: str, prefix: str) -> dict[tuple[int, int], str]:
    columns: list[int] = []
    links: dict[tuple[int, int], str] = {}
    for line in text.splitlines():
        words = line.split()
        numbers = [int(word[len(prefix) :]) for word in words if re.fullmatch(prefix + NUMBER_PATTERN, word)]
        if len(numbers) > 1:
            columns = numbers  # the header names every device, a row only its own
        elif numbers:
            for column, link in zip(columns, words[1:], strict=False):
                links[numbers[0], column] = link
    return links


def _rank_link(link: str) -> int:
    if match := re.fullmatch(rf"NV({NUMBER_PATTERN})", link):
        return 100 + int(match[1])
    return _LINKS_WEAKEST_FIRST.index(link) if link in _LINKS_WEAKEST_FIRST else 0
