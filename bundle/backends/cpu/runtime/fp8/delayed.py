"""Delayed scaling: the scale of one operand of one layer, from the largest values of its past calls."""

from collections import deque
from enum import Enum, auto

import torch
import torch.distributed as dist
from torch import Tensor

from bundle.backends.cpu.runtime.fp8.scales import exact_scale, largest

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


class DelayedScale:
    """The scale of this call from the calls before: 1 at first, then by the largest of the last 1024 values.

    As Transformer Engine's: `group` (megatron's amax reduction group) shares the largest value, recomputation
    uses the scale of the pass that it repeats, and evaluation changes nothing. The value of a call is taken
    into account when the next one comes, so that it costs no collective at the end of a step.
    """

    def __init__(self, dtype: torch.dtype, group: dist.ProcessGroup | None) -> None:
        self.dtype, self.group = dtype, group
        self.scale = torch.ones(())
        self.history: deque[float] = deque(maxlen=HISTORY)
        self._pending: Tensor | None = None
        self._promised: deque[Tensor] = deque()

    def of(self, x: Tensor, phase: Phase) -> Tensor:
        """The scale for `x`, whose largest value is remembered for later calls; float32, no dimensions."""
        if phase is Phase.RECOMPUTED:
            return self._promised.popleft()
        if phase is Phase.EVALUATED:
            return self.scale
        self._update()
        self._pending = largest(x)
        if phase is Phase.CHECKPOINTED:
            self._promised.append(self.scale)
        return self.scale

    def _update(self) -> None:
        if self._pending is None:
            return
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(self._pending, op=dist.ReduceOp.MAX, group=self.group)
        self.history.append(float(self._pending))
        amax = torch.tensor(max(self.history))
        if 0 < amax < torch.inf:
            self.scale = exact_scale(amax, self.dtype)
        self._pending = None
