"""What wrappers read while megatron runs, set by the engine around its calls."""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from bundle.errors import JobFailed

T = TypeVar("T")


class Slot(Generic[T]):
    """A value for the duration of a `with`, the same in every thread of the process.

    Not a contextvars.ContextVar: on accelerators autograd runs the backward pass, and with it every
    recomputation, in threads of its own, where a context variable has its default again.
    """

    def __init__(self, default: T) -> None:
        self._value = default

    def get(self) -> T:
        return self._value

    @contextmanager
    def set(self, value: T) -> Iterator[None]:
        before, self._value = self._value, value
        try:
            yield
        finally:
            self._value = before


def in_backward() -> bool:
    """True inside a backward pass, where a forward function runs only as a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


@dataclass(frozen=True)
class Forced:
    """What the routers of a model chunk must choose in one forward pass: experts [t, k] by layer.

    `rows` [t] is True where they must, and the router chooses by itself in the others; None: in all rows.
    """

    experts: Mapping[int, torch.Tensor]
    rows: torch.Tensor | None = None

    def applied(self, layer: int, own: torch.Tensor) -> torch.Tensor:
        """The experts [t, k] of a layer whose router by itself chooses `own`."""
        experts = self.experts[layer]
        if experts.shape != own.shape:
            raise JobFailed(
                f"Router replay: layer {layer} is to choose experts of shape {list(experts.shape)} for a"
                f" micro-batch of shape {list(own.shape)} (tokens of this rank, experts per token). Pack the"
                " routes as the tokens were, FP8 padding included."
            )
        experts = experts.to(own.dtype)
        return experts if self.rows is None else torch.where(self.rows[:, None], experts, own)


class Choices:
    """What the routers chose in one run of a schedule, in its forward passes and again when recomputed.

    One object per run: whatever an interrupted run leaves behind goes with it. Routers are known by the
    layers that they are given here, counted over the whole model; the others choose as they like. Choices
    are kept as `dtype`, which can name every expert; for recomputation only if there will be a `backward`.
    """

    def __init__(self, layers: Mapping[object, int], dtype: torch.dtype, *, backward: bool) -> None:
        self._layers, self._dtype, self._backward = layers, dtype, backward
        self._forced: Forced | None = None
        self._made: dict[int, torch.Tensor] = {}
        self._again: dict[int, deque[torch.Tensor]] = defaultdict(deque)

    @contextmanager
    def of_forward(self, forced: Forced | None) -> Iterator[dict[int, torch.Tensor]]:
        """The choices [t, k] of the forward pass inside, by layer: filled as they are made."""
        self._forced, self._made = forced, {}
        try:
            yield self._made
        finally:
            self._forced, self._made = None, {}

    def choose(self, router: object, own: torch.Tensor) -> torch.Tensor:
        """Returns the experts [t, k] to use where the router by itself chooses `own`."""
        layer = self._layers.get(router)
        if layer is None:
            return own
        if in_backward():  # the pipeline recomputes micro-batches in the order of their forward passes
            return self._again[layer].popleft().to(own.dtype)
        chosen = own if self._forced is None else self._forced.applied(layer, own)
        self._made[layer] = chosen.detach().to(self._dtype)
        if self._backward and not torch.is_grad_enabled():  # the first pass of a checkpoint
            self._again[layer].append(self._made[layer])
        return chosen


choices: Slot[Choices | None] = Slot(None)

run: Slot[object | None] = Slot(None)
"""The run of a schedule that is under way, a new object each: all micro-batches of a step see one."""
