"""What wrappers read while megatron runs, set by the engine around its calls."""

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
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


class Routes:
    """The expert choices of one forward-backward, by router: recorded, or given and replayed.

    One object per step: whatever an interrupted step leaves behind goes with it.
    """

    def __init__(self, *, replay: bool) -> None:
        self.replay = replay
        self.recorded: dict[torch.nn.Module, list[torch.Tensor]] = defaultdict(list)
        self._given: dict[torch.nn.Module, deque[torch.Tensor]] = defaultdict(deque)
        self._again: dict[torch.nn.Module, deque[torch.Tensor]] = defaultdict(deque)

    def give(self, router: torch.nn.Module, routes: torch.Tensor) -> None:
        """Queues the routes [t, k] of the router's next micro-batch; a row with a -1 is left free."""
        self._given[router].append(routes)

    def choose(self, router: torch.nn.Module, own: torch.Tensor) -> torch.Tensor:
        """Returns the experts [t, k] to use where the router by itself chooses `own`."""
        if in_backward():  # the pipeline recomputes micro-batches in the order of their forward passes
            return self._again[router].popleft()
        chosen = self._next(router, own) if self.replay else own
        if not self.replay:
            self.recorded[router].append(own.detach().clone())
        if router.training and not torch.is_grad_enabled():  # the first pass of a checkpoint
            self._again[router].append(chosen.detach())
        return chosen

    def _next(self, router: torch.nn.Module, own: torch.Tensor) -> torch.Tensor:
        if not self._given[router]:
            raise JobFailed("Router replay: a router met a micro-batch for which it was given no routes.")
        routes = self._given[router].popleft().to(own)
        if routes.shape != own.shape:
            raise JobFailed(
                f"Router replay: routes of shape {tuple(routes.shape)} for a micro-batch whose router"
                f" chooses {tuple(own.shape)} (tokens of this rank, experts per token)."
            )
        return torch.where((routes < 0).any(-1, keepdim=True), own, routes)


routes: Slot[Routes | None] = Slot(None)
