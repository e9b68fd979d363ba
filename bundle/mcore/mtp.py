"""Multi-token prediction of a bare GPTModel: left out, or detached from the rest, and megatron's losses."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def disable_mtp(model: torch.nn.Module) -> Iterator[None]:
    """Disable multi-token prediction of this bare GPTModel: no layer of it runs, labels may be absent.

    Use it for one forward pass at a time: the configuration is that of all chunks of a virtual pipeline.
    """
    config = model.config
    before = model.mtp_process, config.mtp_num_layers
    model.mtp_process, config.mtp_num_layers = False, None
    try:
        yield
    finally:
        model.mtp_process, config.mtp_num_layers = before


def detach_mtp(model: torch.nn.Module, *, trunk: bool, embeddings: bool) -> None:
    """Keep the gradient of the MTP losses out of the trunk, or of both embeddings (input and output).

    It works in every release (0.19 has an option for both at once). On stages without MTP it does nothing.
    """
    block = getattr(model, "mtp", None)
    if block is None:
        return
    forward, depth_rows = block.forward, _NonTrunkRowDetector()

    def forward_detached(*args: Any, hidden_states: Tensor, embedding: Any, **keywords: Any) -> Tensor:
        arguments = {"hidden_states": hidden_states, "embedding": embedding, **keywords}
        if embeddings:
            arguments["embedding"] = lambda *a, **k: _ZeroGradient.apply(embedding(*a, **k))
            if "output_layer" in arguments:  # to 0.13 the block itself calls the head
                arguments["output_weight"] = _detach_weight(
                    arguments["output_layer"], arguments.get("output_weight")
                )
        if trunk:
            arguments["hidden_states"] = _ZeroGradient.apply(hidden_states)
        result: Tensor = forward(*args, **arguments)
        if trunk:
            result = _MainLossGradientBypass.apply(hidden_states, result)
        depth_rows.record_location(result, hidden_states.numel())
        return result

    def detach_head(layer: torch.nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if not depth_rows.contains(args[0]):
            return None
        return args, {**keywords, "weight": _detach_weight(layer, keywords.get("weight"))}

    block.forward = forward_detached
    if embeddings:
        model.output_layer.register_forward_pre_hook(detach_head, with_kwargs=True)


def _detach_weight(layer: torch.nn.Module, weight: Tensor | None) -> Tensor:
    """Return the head's weight (its own, or the embedding's if tied) as a constant."""
    fixed: Tensor = (layer.weight if weight is None else weight).detach()
    return fixed


class _NonTrunkRowDetector:
    """The block's result from 0.14 on: rows of the trunk, then those of each depth; the model cuts them."""

    def __init__(self) -> None:
        self._storage, self._first = -1, 0

    def record_location(self, result: Tensor, first: int) -> None:
        self._storage, self._first = result.untyped_storage().data_ptr(), first

    def contains(self, rows: Tensor) -> bool:
        is_same_storage = rows.untyped_storage().data_ptr() == self._storage
        return bool(is_same_storage and rows.storage_offset() >= self._first)


class _ZeroGradient(torch.autograd.Function):
    """The same tensor; its gradient is zero.

    Not `detach_mtp`: a recomputed layer needs an input with a gradient, and megatron's data-parallel wrapper
    waits for one of every weight, also of the last stage's copy of the embedding, which only MTP reads.
    """

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return torch.zeros_like(gradient)


class _MainLossGradientBypass(torch.autograd.Function):
    """`result`, whose first rows are `hidden`: the gradient of those goes to `hidden` too."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, result: Tensor) -> Tensor:
        ctx.rows = hidden.shape[0]
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient[: ctx.rows], gradient


def read_local_losses() -> torch.Tensor:
    """Return the loss of each depth as this rank recorded it, [depths]; megatron averages it over dp x cp."""
    tracker = _get_tracker()
    losses: torch.Tensor = tracker["values" if "values" in tracker else "loss_values"]  # renamed in 0.19
    return losses.clone()


def clear_logged_losses() -> None:
    """Remove the recorded losses and their number of depths: megatron keeps that of the first model."""
    _get_tracker().clear()


def _get_tracker() -> dict[str, Any]:
    """Return megatron's tracker of the MTP losses.

    It is imported late: patches are applied, and need this module, while megatron's own is being imported.
    """
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker: dict[str, Any] = MTPLossLoggingHelper.tracker
    return tracker
