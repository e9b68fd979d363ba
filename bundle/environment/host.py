"""What the host and the container let this process use, and what connects its devices.

Processors, memory and limits; the topology matrix of nvidia-smi or npu-smi; RDMA ports of sysfs.
"""

import math
import re
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import PurePosixPath

from bundle.environment.machine import NUMBER, Fact, Host, Machine

# cgroup v1 writes "no limit" as the largest multiple of the page size below 2^63.
_NO_LIMIT_V1 = 2**62

_RANGE = rf"{NUMBER}(?:-{NUMBER})?"
_LONGEST_PATH = 4096

# From the weakest up, as both tools' legends define them; NV<n> (NVLink lanes) ranks above by n.
_RANKS = ("NA", "SYS", "NODE", "PHB", "PXB", "PIX", "HCCS_SW", "HCCS", "SIO")


def host(machine: Machine) -> Host:
    """The limits of this process on this machine; every one says which file it comes from."""
    total = _memory_total(machine)
    limits = machine.read("/proc/self/limits")
    return Host(
        processors=_processors(machine),
        memory=_memory(machine, total),
        shared_memory=_shared_memory(machine, total),
        locked_memory=_limit(limits, "Max locked memory"),
        open_files=_limit(limits, "Max open files"),
        stack=_limit(limits, "Max stack size"),
    )


def memory_kills(machine: Machine) -> int:
    """How often the kernel has killed for want of memory: in our own cgroups, and on the machine if it tells.

    Only a growing number means something.
    """
    texts = [machine.read("/proc/vmstat").value]
    for directory in _cgroups(machine, "memory"):
        names = ("memory.events", "memory.oom_control")
        texts += [machine.read(f"{directory}/{name}").value for name in names]
    counts = (re.search(rf"^oom_kill ({NUMBER})$", text or "", re.MULTILINE) for text in texts)
    return sum(int(count[1]) for count in counts if count)


def _memory_total(machine: Machine) -> Fact[float]:
    text = machine.read("/proc/meminfo")
    match = re.search(rf"^MemTotal:\s*({NUMBER}) kB", text.value or "", re.MULTILINE)
    return Fact(
        float(int(match[1]) * 1024) if match else None, "/proc/meminfo MemTotal" if match else text.reason
    )


def _memory(machine: Machine, total: Fact[float]) -> Fact[float]:
    """The least of the machine's memory and every cgroup limit above this process."""
    found = [] if total.value is None else [(total.value, total.reason)]
    for directory in _cgroups(machine, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = (machine.read(f"{directory}/{name}").value or "").strip()
            if re.fullmatch(r"\d{1,19}", text) and int(text) < _NO_LIMIT_V1:
                found.append((float(text), f"{directory}/{name}"))
    return Fact(*min(found)) if found else total


def _processors(machine: Machine) -> Fact[float]:
    """The least of the allowed processors and every cgroup quota above this process; may be a fraction."""
    status = machine.read("/proc/self/status")
    match = re.search(rf"^Cpus_allowed_list:\s*({_RANGE}(?:,{_RANGE})*)$", status.value or "", re.MULTILINE)
    found = [(float(_count(match[1])), "/proc/self/status Cpus_allowed_list")] if match else []
    for directory in _cgroups(machine, "cpu"):
        unified = machine.read(f"{directory}/cpu.max").value or ""  # "200000 100000", or "max 100000"
        split = [machine.read(f"{directory}/cpu.cfs_{name}_us").value or "" for name in ("quota", "period")]
        quota = re.fullmatch(rf"({NUMBER})\s+({NUMBER})\s*", unified or " ".join(split))
        if quota and int(quota[2]):
            found.append((int(quota[1]) / int(quota[2]), f"the quota in {directory}"))
    return Fact(*min(found)) if found else Fact(None, status.reason)


def _count(ranges: str) -> int:
    """How many processors a list such as 0-3,8 names."""
    ends = (part.split("-") for part in ranges.split(","))
    return sum(int(end[-1]) - int(end[0]) + 1 for end in ends)


def _cgroups(machine: Machine, controller: str) -> Iterator[str]:
    """Every directory whose limit on `controller` binds this process, v1 and v2, up to the mount.

    Inside a container the path in /proc/self/cgroup may be the host's, of which the mount shows only the end;
    a directory that is not there holds no limit, so trying each prefix finds the right ones in every
    arrangement.
    """
    mounts = _mounts(machine)
    for line in (machine.read("/proc/self/cgroup").value or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        unified = number == "0" and not controllers
        if len(path) > _LONGEST_PATH or (not unified and controller not in controllers.split(",")):
            continue
        for point, kind, options in mounts:
            if kind == ("cgroup2" if unified else "cgroup") and (unified or controller in options):
                inner = PurePosixPath(path.lstrip("/"))
                yield from (str(PurePosixPath(point, part)) for part in (inner, *inner.parents))


def _mounts(machine: Machine) -> list[tuple[str, str, list[str]]]:
    """(mount point, file system, super options) of each line of mountinfo, in mounting order."""
    mounts = []
    for line in (machine.read("/proc/self/mountinfo").value or "").splitlines():
        before, separator, after = line.partition(" - ")
        if separator and len(before.split()) >= 5 and len(after.split()) >= 3:
            kind, _, options = after.split()[:3]
            mounts.append((before.split()[4], kind, options.split(",")))
    return mounts


def _shared_memory(machine: Machine, total: Fact[float]) -> Fact[float]:
    """The size of /dev/shm: the last mount on it wins, and tmpfs takes half of the memory by default."""
    mounted = [options for point, _, options in _mounts(machine) if point == "/dev/shm"]
    if not mounted:
        return Fact(None, "nothing is mounted on /dev/shm")
    for option in mounted[-1]:
        if match := re.fullmatch(rf"size=({NUMBER})([kmg]?)", option):
            return Fact(
                float(int(match[1]) * 1024 ** " kmg".index(match[2] or " ")),
                f"the mount of /dev/shm, {option}",
            )
    half = None if total.value is None else total.value / 2
    return Fact(half, "/dev/shm is mounted without a size: half of the memory")


def _limit(limits: Fact[str], name: str) -> Fact[float]:
    for line in (limits.value or "").splitlines():
        soft = line.removeprefix(name).split()[:1]
        if line.startswith(name) and soft and (soft[0] == "unlimited" or soft[0].isdecimal()):
            return Fact(math.inf if soft[0] == "unlimited" else float(soft[0]), f"/proc/self/limits {name}")
    return Fact(None, limits.reason)


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


def rdma(machine: Machine) -> Fact[tuple[str, ...]]:
    """The active RDMA ports, "mlx5_0/1: InfiniBand 400 Gb/sec (4X NDR)"; an empty tuple: there is none."""
    base = "/sys/class/infiniband"
    ports: list[str] = []
    idle = 0
    for device in machine.names(base):
        for port in machine.names(f"{base}/{device}/ports"):
            at = f"{base}/{device}/ports/{port}"
            state, layer, rate = (
                (machine.read(f"{at}/{name}").value or "").strip() for name in ("state", "link_layer", "rate")
            )
            if "ACTIVE" in state:
                ports.append(f"{device}/{port}: {layer or 'unknown layer'} {rate}".rstrip())
            else:
                idle += 1
    if not ports:
        return Fact((), f"{base} has no active port" + (f" ({idle} down)" if idle else ""))
    if not any(name.startswith("uverbs") for name in machine.names("/dev/infiniband")):
        return Fact(
            (),
            f"{base} has {len(ports)} active port(s), but /dev/infiniband/uverbs* is not in this container",
        )
    return Fact(tuple(ports), base)
