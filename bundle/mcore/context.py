"""Values that wrappers read while megatron runs; the engine sets them around its calls."""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from bundle.errors import JobFailed

T = TypeVar("T")


class ProcessWideOverride(Generic[T]):
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


def is_in_backward() -> bool:
    """Return whether a backward pass runs, in which a forward function runs only as a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


@dataclass(frozen=True)
class ForcedRoutes:
    """The experts [t, k] that the routers of a model chunk must choose in one forward pass, by layer.

    `row_mask` [t] is True in rows where they must; in the others the router chooses itself. None: in all
    rows.
    """

    experts: Mapping[int, torch.Tensor]
    row_mask: torch.Tensor | None = None

    def apply(self, layer: int, native_experts: torch.Tensor) -> torch.Tensor:
        """Return the experts [t, k] of a layer whose router itself chooses `native_experts`."""
        experts = self.experts[layer]
        if experts.shape != native_experts.shape:
            raise JobFailed(
                f"Router replay: the routes of layer {layer} have shape {list(experts.shape)}, but the"
                f" micro-batch needs {list(native_experts.shape)} (tokens of this rank, experts per token)."
                " Pack the routes like the tokens, including FP8 padding."
            )
        experts = experts.to(native_experts.dtype)
        return (
            experts if self.row_mask is None else torch.where(self.row_mask[:, None], experts, native_experts)
        )


class RouterChoices:
    """The choices of the routers in one run of a schedule, in its forward passes and when recomputed.

    There is one object per run: what an interrupted run leaves behind goes with it. Routers are known by the
    layers that they are given here, counted over the whole model; other routers choose freely. Choices are
    kept as `dtype`, which can name every expert; for recomputation only where `has_backward`.
    """

    def __init__(self, layers: Mapping[object, int], dtype: torch.dtype, *, has_backward: bool) -> None:
        self._layers, self._dtype, self._has_backward = layers, dtype, has_backward
        self._forced: ForcedRoutes | None = None
        self._chosen: dict[int, torch.Tensor] = {}
        self._recompute_queues: dict[int, deque[torch.Tensor]] = defaultdict(deque)

    @contextmanager
    def record_forward(self, forced: ForcedRoutes | None) -> Iterator[dict[int, torch.Tensor]]:
        """Yield the choices [t, k] of the forward pass inside, by layer: filled as they are made."""
        self._forced, self._chosen = forced, {}
        try:
            yield self._chosen
        finally:
            self._forced, self._chosen = None, {}

    def choose(self, router: object, native_experts: torch.Tensor) -> torch.Tensor:
        """Return the experts [t, k] to use where the router itself chooses `native_experts`."""
        layer = self._layers.get(router)
        if layer is None:
            return native_experts
        if is_in_backward():  # the pipeline recomputes micro-batches in the order of their forward passes
            return self._recompute_queues[layer].popleft().to(native_experts.dtype)
        chosen = native_experts if self._forced is None else self._forced.apply(layer, native_experts)
        self._chosen[layer] = chosen.detach().to(self._dtype)
        if self._has_backward and not torch.is_grad_enabled():  # the first pass of a checkpoint
            self._recompute_queues[layer].append(self._chosen[layer])
        return chosen


router_choices: ProcessWideOverride[RouterChoices | None] = ProcessWideOverride(None)

schedule_run: ProcessWideOverride[object | None] = ProcessWideOverride(None)
"""The run of a schedule that is under way, a new object each: all micro-batches of a step see one."""
