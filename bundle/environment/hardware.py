"""The hardware to plan for: the devices and the backend of this machine, or a preset with a name.

The host's values are what the host and the container let this process use: processors, memory, limits and the
RDMA ports of sysfs. No framework is imported, because its answer changes with what it patches.
"""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from bundle.environment import BACKENDS, ascend, nvidia
from bundle.environment.machine import (
    NUMBER_PATTERN,
    Accelerator,
    DetectedValue,
    Hardware,
    Host,
    Machine,
    VendorDevices,
    build_local_machine,
)
from bundle.errors import EnvironmentUnfit, UsageError

BACKEND_CHOICES_WITH_AUTO = ("auto", *BACKENDS)  # auto: what the machine has

MIB = 2**20
# Open files of an agent besides the connections to its store and two logs of each rank; measured.
_AGENT_BASE_OPEN_FILES = 12
# cgroup v1 writes "no limit" as the largest multiple of the page size below 2^63.
_CGROUP_V1_UNLIMITED_THRESHOLD = 2**62

_RANGE_PATTERN = rf"{NUMBER_PATTERN}(?:-{NUMBER_PATTERN})?"
_LONGEST_CGROUP_PATH = 4096

# One node of a product, measured: name -> (backend, devices per node, device name, generation, memory [MiB],
# link, source of the numbers). The link is None where no matrix of such a node was available.
_PRESETS: dict[str, tuple[str, int, str, str, int, str | None, str]] = {
    "a100": ("cuda", 8, "NVIDIA A100-SXM4-80GB", "8.0", 81920, None, "modal-labs/modal-client#2797"),
    "h100": (
        "cuda", 8, "NVIDIA H100 80GB HBM3", "9.0", 81559, "NV18",
        "nvidia-smi: modal-labs/modal-client#2797; topo -m: NVIDIA/nccl#1264",
    ),
    "h200": ("cuda", 8, "NVIDIA H200", "9.0", 143771, "NV18", "nvidia-smi, driver 580.159.04"),
    "b200": ("cuda", 8, "NVIDIA B200", "10.0", 182630, None, "device query, 178.35 GiB: pytorch/ao#4002"),
    "a2": ("ascend", 8, "910B2C", "a2", 65536, None, "npu-smi: vllm-project/vllm-ascend#676"),
    "a3": ("ascend", 16, "Ascend910", "a3", 65536, None, "npu-smi: vllm-project/vllm-ascend#2035"),
}  # fmt: skip

PRESET_NAMES = (*_PRESETS, "cpu")


def detect(backend: str = "auto", machine: Machine | None = None) -> Hardware:
    """Return the hardware of a machine for a backend; `auto` takes its accelerator, or else the CPU.

    Raise EnvironmentUnfit if both kinds of accelerator are visible or the requested backend has no device
    here. Raise it also if the driver refuses the value of a visibility variable.
    """
    machine = machine or build_local_machine()
    if backend == "cpu":
        return _build_cpu_hardware(machine, "as requested; accelerators were not probed")
    if backend not in BACKEND_CHOICES_WITH_AUTO:
        raise ValueError(f"unknown backend {backend!r}: choose one of {', '.join(BACKEND_CHOICES_WITH_AUTO)}")
    vendors = [vendor.find(machine) for vendor in (nvidia, ascend)]
    candidates = [side for side in vendors if backend in ("auto", side.backend)]
    if faults := [fault for side in candidates for fault in side.faults]:
        raise EnvironmentUnfit("a visible-device variable has an invalid value", faults)
    usable = [side for side in candidates if side.devices]
    if len(usable) > 1:
        raise EnvironmentUnfit(_explain_conflict(usable))
    if usable:
        return _build_accelerator_hardware(machine, usable[0])
    if backend != "auto":
        raise EnvironmentUnfit(f"backend {backend} has no device here: {_explain_absence(candidates)}")
    return _build_cpu_hardware(machine, _explain_absence(candidates))


def _build_accelerator_hardware(machine: Machine, side: VendorDevices) -> Hardware:
    shown = f"{len(side.devices)} of {side.present} {side.noun}s ({side.devices[0].name}); {side.reason}"
    return Hardware(
        backend=side.backend,
        reason=shown,
        devices=side.devices,
        driver=side.driver,
        toolkit=side.toolkit,
        link=side.link,
        rdma=find_rdma_ports(machine),
        host=read_host_limits(machine),
        notes=side.notes,
    )


def _build_cpu_hardware(machine: Machine, reason: str) -> Hardware:
    none: DetectedValue[str] = DetectedValue(None, "no accelerator in use")
    return Hardware("cpu", reason, (), none, none, none, find_rdma_ports(machine), read_host_limits(machine))


def _explain_absence(sides: Sequence[VendorDevices]) -> str:
    return "; ".join(
        f"{side.present} {side.noun}s are hidden: {side.reason}" if side.present else side.reason
        for side in sides
    )


def _explain_conflict(sides: Sequence[VendorDevices]) -> str:
    seen = " and ".join(f"{len(side.devices)} {side.noun}s" for side in sides)
    return (
        f"this machine has {seen}, but torch supports one kind of accelerator per process. Choose with"
        " `backend: cuda` or `backend: ascend` in the recipe (or --backend), and hide the others from"
        f" torch: {ascend.VISIBLE_DEVICES}= (empty) for CUDA, {nvidia.VISIBLE_DEVICES}= (empty) for Ascend"
    )


def build_preset(name: str, per_node: int | None = None) -> Hardware:
    """Return the hardware preset called `name`. Raise UsageError for an unknown name.

    `per_node`: the number of devices per node; None: the product's own number.
    """
    unknown: DetectedValue[float] = DetectedValue(None, f"--hardware {name} does not describe the host")
    host = Host(unknown, unknown, unknown, unknown, unknown, unknown)
    none: DetectedValue[str] = DetectedValue(None, "unknown for a --hardware preset")
    ports: DetectedValue[tuple[str, ...]] = DetectedValue(None, none.reason)
    if name == "cpu":
        return Hardware("cpu", "--hardware cpu", (), none, none, none, ports, host)
    if name not in _PRESETS:
        raise UsageError(f"no hardware preset is called {name!r}; choose one of {', '.join(PRESET_NAMES)}")
    backend, product_count, device, generation, memory, link, source = _PRESETS[name]
    count = product_count if per_node is None else per_node
    return Hardware(
        backend=backend,
        reason=f"--hardware {name}: {count} x {device}",
        devices=tuple(
            Accelerator(
                i,
                i,
                device,
                f"{name}-{i}",
                DetectedValue(memory * MIB, source),
                DetectedValue(generation, source),
            )
            for i in range(count)
        ),
        driver=none,
        toolkit=none,
        link=DetectedValue(link, source),
        rdma=ports,
        host=host,
    )


def read_host_limits(machine: Machine) -> Host:
    """Return the limits of this process on this machine, each with the file that it was read from."""
    total = _read_total_memory_bytes(machine)
    limits = machine.read("/proc/self/limits")
    return Host(
        processors=_count_processors(machine),
        memory=_read_memory_limit(machine, total),
        shared_memory=_read_shm_size(machine, total),
        locked_memory=_read_limit(limits, "Max locked memory"),
        open_files=_read_limit(limits, "Max open files", column=1),
        stack=_read_limit(limits, "Max stack size"),
    )


def count_oom_kills(machine: Machine) -> int:
    """Return how often the kernel has killed a process for lack of memory; only an increase has a meaning.

    The count covers the cgroups of this process, and the machine where /proc/vmstat tells it.
    """
    texts = [machine.read("/proc/vmstat").value]
    for directory in _find_cgroups(machine, "memory"):
        names = ("memory.events", "memory.oom_control")
        texts += [machine.read(f"{directory}/{name}").value for name in names]
    counts = (re.search(rf"^oom_kill ({NUMBER_PATTERN})$", text or "", re.MULTILINE) for text in texts)
    return sum(int(count[1]) for count in counts if count)


def _read_total_memory_bytes(machine: Machine) -> DetectedValue[float]:
    text = machine.read("/proc/meminfo")
    match = re.search(rf"^MemTotal:\s*({NUMBER_PATTERN}) kB", text.value or "", re.MULTILINE)
    return DetectedValue(
        float(int(match[1]) * 1024) if match else None, "/proc/meminfo MemTotal" if match else text.reason
    )


def _read_memory_limit(machine: Machine, total: DetectedValue[float]) -> DetectedValue[float]:
    """Return the minimum of the machine's memory and all cgroup limits above this process [bytes]."""
    limits = [] if total.value is None else [(total.value, total.reason)]
    for directory in _find_cgroups(machine, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = (machine.read(f"{directory}/{name}").value or "").strip()
            if re.fullmatch(r"\d{1,19}", text) and int(text) < _CGROUP_V1_UNLIMITED_THRESHOLD:
                limits.append((float(text), f"{directory}/{name}"))
    return DetectedValue(*min(limits)) if limits else total


def _count_processors(machine: Machine) -> DetectedValue[float]:
    """Return the minimum of the allowed processors and all cgroup quotas above this process.

    It may be a fraction.
    """
    status = machine.read("/proc/self/status")
    match = re.search(
        rf"^Cpus_allowed_list:\s*({_RANGE_PATTERN}(?:,{_RANGE_PATTERN})*)$", status.value or "", re.MULTILINE
    )
    limits = [(float(_count_range(match[1])), "/proc/self/status Cpus_allowed_list")] if match else []
    for directory in _find_cgroups(machine, "cpu"):
        unified = machine.read(f"{directory}/cpu.max").value or ""  # "200000 100000", or "max 100000"
        quota_and_period = [
            machine.read(f"{directory}/cpu.cfs_{name}_us").value or "" for name in ("quota", "period")
        ]
        quota = re.fullmatch(
            rf"({NUMBER_PATTERN})\s+({NUMBER_PATTERN})\s*", unified or " ".join(quota_and_period)
        )
        if quota and int(quota[2]):
            limits.append((int(quota[1]) / int(quota[2]), f"the quota in {directory}"))
    return DetectedValue(*min(limits)) if limits else DetectedValue(None, status.reason)


def _count_range(ranges: str) -> int:
    """Return the number of processors that a list such as 0-3,8 names."""
    ends = (part.split("-") for part in ranges.split(","))
    return sum(int(end[-1]) - int(end[0]) + 1 for end in ends)


def _find_cgroups(machine: Machine, controller: str) -> Iterator[str]:
    """Yield every directory whose limit on `controller` binds this process, v1 and v2, up to the mount.

    Inside a container the path in /proc/self/cgroup may be the host's, and the mount shows only the end of
    that path. A directory that does not exist holds no limit. Therefore trying each prefix finds the right
    directories in every arrangement.
    """
    mounts = _read_mounts(machine)
    for line in (machine.read("/proc/self/cgroup").value or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        unified = number == "0" and not controllers
        if len(path) > _LONGEST_CGROUP_PATH or (not unified and controller not in controllers.split(",")):
            continue
        for mount_point, kind, options in mounts:
            if kind == ("cgroup2" if unified else "cgroup") and (unified or controller in options):
                inner = PurePosixPath(path.lstrip("/"))
                yield from (str(PurePosixPath(mount_point, part)) for part in (inner, *inner.parents))


def _read_mounts(machine: Machine) -> list[tuple[str, str, list[str]]]:
    """Return (mount point, file system, super options) of each line of mountinfo, in mounting order."""
    mounts = []
    for line in (machine.read("/proc/self/mountinfo").value or "").splitlines():
        before, separator, after = line.partition(" - ")
        if separator and len(before.split()) >= 5 and len(after.split()) >= 3:
            kind, _, options = after.split()[:3]
            mounts.append((before.split()[4], kind, options.split(",")))
    return mounts


def _read_shm_size(machine: Machine, total: DetectedValue[float]) -> DetectedValue[float]:
    """Return the size of /dev/shm [bytes] by its last mount; by default tmpfs takes half of the memory."""
    mounted = [options for point, _, options in _read_mounts(machine) if point == "/dev/shm"]
    if not mounted:
        return DetectedValue(None, "nothing is mounted on /dev/shm")
    for option in mounted[-1]:
        if match := re.fullmatch(rf"size=({NUMBER_PATTERN})([kmg]?)", option):
            return DetectedValue(
                float(int(match[1]) * 1024 ** " kmg".index(match[2] or " ")),
                f"the mount of /dev/shm, {option}",
            )
    half = None if total.value is None else total.value / 2
    return DetectedValue(half, "/dev/shm is mounted without a size: half of the memory")


def count_node_0_open_files(nodes: int, per_node: int) -> int:
    """Return the open files of node 0's agent, whose store has a connection from each rank and each agent."""
    return nodes * (per_node + 1) + 2 * per_node + _AGENT_BASE_OPEN_FILES


def _read_limit(limits: DetectedValue[str], name: str, column: int = 0) -> DetectedValue[float]:
    """Return the soft limit of that name, or with column 1 the hard limit."""
    for line in (limits.value or "").splitlines():
        words = line.removeprefix(name).split()[column : column + 1]
        if line.startswith(name) and words and (words[0] == "unlimited" or words[0].isdecimal()):
            return DetectedValue(
                math.inf if words[0] == "unlimited" else float(words[0]), f"/proc/self/limits {name}"
            )
    return DetectedValue(None, limits.reason)


def find_rdma_ports(machine: Machine) -> DetectedValue[tuple[str, ...]]:
    """Return the active RDMA ports, like "mlx5_0/1: InfiniBand 400 Gb/sec (4X NDR)"; an empty tuple: none."""
    base = "/sys/class/infiniband"
    ports: list[str] = []
    idle = 0
    for device in machine.list_names(base):
        for port in machine.list_names(f"{base}/{device}/ports"):
            port_directory = f"{base}/{device}/ports/{port}"
            state, layer, rate = (
                (machine.read(f"{port_directory}/{name}").value or "").strip()
                for name in ("state", "link_layer", "rate")
            )
            if "ACTIVE" in state:
                ports.append(f"{device}/{port}: {layer or 'unknown layer'} {rate}".rstrip())
            else:
                idle += 1
    if not ports:
        return DetectedValue((), f"{base} has no active port" + (f" ({idle} down)" if idle else ""))
    if not any(name.startswith("uverbs") for name in machine.list_names("/dev/infiniband")):
        return DetectedValue(
            (),
            f"{base} has active ports ({len(ports)}), but /dev/infiniband/uverbs* is not in this container",
        )
    return DetectedValue(tuple(ports), base)
