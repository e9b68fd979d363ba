"""What a rank of each stage needs, and whether the devices and the host have it."""

from collections.abc import Iterator, Sequence

from bundle.frozen import frozen
from bundle.hardware import Fact, Hardware
from bundle.planning.activations import Activations
from bundle.planning.placement import Chunk
from bundle.planning.problem import Problem, hardware_problem, recipe_problem
from bundle.planning.states import States
from bundle.recipe.sections import MOST_PER_NODE

GIB = 2**30
# What a plan does not count: the device's context, communication buffers, workspaces and fragmentation.
HEADROOM = 0.1


@frozen
class Stage:
    """One pipeline stage: what its ranks hold, and the bytes of the one that needs most."""

    index: int
    chunks: tuple[Chunk, ...]
    states: States
    activations: Activations

    @property
    def total(self) -> int:
        """Bytes at the worst moment of a step."""
        return self.states.total + self.activations.total


def devices_problems(hardware: Hardware, per_node: int) -> Iterator[Problem]:
    """Too few devices, ones that are not for training, or more ranks than a machine can start."""
    present = len(hardware.devices)
    if per_node > MOST_PER_NODE:
        yield recipe_problem(f"devices.per_node: {per_node} ranks on one machine, {MOST_PER_NODE} at most")
    if hardware.backend != "cpu" and per_node > present:
        yield hardware_problem(
            f"devices.per_node: {per_node} wanted, {present} visible here ({hardware.reason}): "
            "lower devices.per_node, or use a machine that has them"
        )
    if hardware.unfit:
        yield hardware_problem(hardware.unfit)


def memory_problems(stages: Sequence[Stage], hardware: Hardware, per_node: int) -> Iterator[Problem]:
    """Every stage that does not fit its devices; on the cpu, ranks that do not fit the host together."""
    if not stages:
        return
    worst = max(stages, key=lambda stage: stage.total)
    if hardware.backend == "cpu":
        host = hardware.host.memory.value
        if host is not None and worst.total * per_node > host:
            needed = f"{per_node} ranks of {shown(worst.total)}"
            yield hardware_problem(f"memory: {needed} do not fit this host's {shown(host)} ({_less(worst)})")
        return
    size = hardware.device_memory.value
    for stage in stages:
        if size is not None and stage.total > size:
            yield hardware_problem(
                f"memory: a rank of stage {stage.index} needs {shown(stage.total)}, "
                f"a device has {shown(size)} ({_less(stage)})"
            )


def memory_note(stages: Sequence[Stage], memory: Fact[int]) -> str | None:
    """A warning where the job fits by numbers but leaves little for what is not counted."""
    worst = max((stage.total for stage in stages), default=0)
    if memory.value is None or not memory.value * (1 - HEADROOM) < worst <= memory.value:
        return None
    return (
        f"memory is tight: {shown(worst)} of {shown(memory.value)}, and the device's context, communication "
        "buffers and fragmentation are not counted"
    )


def _less(stage: Stage) -> str:
    """What would shrink the larger part of a stage."""
    if stage.activations.total > stage.states.total:
        return "mostly activations: smaller train.micro_batch_size, model.recompute, more tp, cp or pp"
    return "mostly weights and optimizer: more tp, pp or ep, or more data-parallel ranks"


def shown(amount: float) -> str:
    """A size for people: 12.3 GiB, 45.6 MiB."""
    for unit, size in (("TiB", 2**40), ("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= size:
            return f"{amount / size:.1f} {unit}"
    return f"{amount:.0f} B"
