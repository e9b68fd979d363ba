"""Delayed scaling: the scale of one operand of one layer, from the largest values of its past calls."""

from collections import deque
from collections.abc import Callable
from enum import Enum, auto

import torch
import torch.distributed as dist
from torch import Tensor

from bundle.backends.cpu.runtime.fp8.scales import exact_scale, largest, rounded
from bundle.mcore import context

HISTORY = 1024  # amax_history_len of transformer_engine's DelayedScaling; its margin is 0


class Phase(Enum):
    """What a forward pass through a layer is for."""

    TRAINED = auto()
    CHECKPOINTED = auto()  # its activations are dropped: it will be computed again
    RECOMPUTED = auto()
    EVALUATED = auto()


def phase_of(*, training: bool) -> Phase:
    """The phase of the forward pass that is running; `training` is the module's.

    Megatron's checkpoints run the first pass without gradients, and the second one inside the backward pass.
    """
    if torch._C._current_graph_task_id() != -1:
        return Phase.RECOMPUTED
    if not training:
        return Phase.EVALUATED
    return Phase.TRAINED if torch.is_grad_enabled() else Phase.CHECKPOINTED


class Delayed:
    """The quantiser of one operand: scale 1 at first, then by the largest value of the last 1024 calls.

    As Transformer Engine's: `group` (megatron's amax reduction group) shares each call's largest value, a
    call with nothing but zeros or with an infinity leaves the scale as it was, recomputation uses the scale
    of the pass that it repeats, and evaluation changes nothing.
    """

    def __init__(self, dtype: torch.dtype, group: dist.ProcessGroup | None) -> None:
        self.dtype, self.group = dtype, group
        self.scale = torch.ones(())
        self.history: deque[float] = deque(maxlen=HISTORY)
        self._promised: deque[Tensor] = deque()

    def __call__(self, x: Tensor, phase: Phase) -> Callable[[Tensor, int], Tensor]:
        """Rounds `x` by this call's scale in both of its products, whatever calls come in between."""
        scale = self._scale_of(x, phase)
        return lambda x, contracted: rounded(x, scale, self.dtype)

    def _scale_of(self, x: Tensor, phase: Phase) -> Tensor:
        scale = self._promised.popleft() if phase is Phase.RECOMPUTED else self.scale
        if phase is Phase.CHECKPOINTED:
            self._promised.append(scale)
        if phase in (Phase.CHECKPOINTED, Phase.TRAINED):
            self._remember(self._largest_of_group(x))
        return scale

    def _largest_of_group(self, x: Tensor) -> float:
        amax = largest(x)
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self.group)
        return float(amax)

    def _remember(self, amax: float) -> None:
        self.history.append(amax)
        latest = torch.tensor(max(self.history))
        if 0 < latest < torch.inf:
            self.scale = exact_scale(latest, self.dtype)


class DelayedWeight(Delayed):
    """The quantiser of a weight: cast by the first micro-batch of a schedule's run, for all of that run.

    As Transformer Engine's `is_first_microbatch`, which megatron's schedules set: later micro-batches, and
    every recomputation, multiply by the copy that the first one made. They still take a row of the history
    each, one of zero, so that a weight's largest value is forgotten when an input's would be.
    """

    def __init__(self, dtype: torch.dtype, group: dist.ProcessGroup | None) -> None:
        super().__init__(dtype, group)
        self._run: object | None = None
        self._cast = self.scale

    def _scale_of(self, x: Tensor, phase: Phase) -> Tensor:
        run = context.run.get()
        if run is None or phase is Phase.EVALUATED:
            return super()._scale_of(x, phase)
        if run is not self._run:
            self._run, self._cast = run, self.scale
            self._remember(self._largest_of_group(x))
        elif phase is not Phase.RECOMPUTED:
            self._remember(0.0)
        return self._cast
