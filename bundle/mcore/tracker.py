"""Megatron's own record of the multi-token prediction losses."""

import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper


def logged_losses() -> torch.Tensor:
    """The loss of each depth as this rank recorded it, [depths]; megatron averages it over dp x cp."""
    tracker = MTPLossLoggingHelper.tracker
    losses: torch.Tensor = tracker["values" if "values" in tracker else "loss_values"]  # renamed in 0.19
    return losses.clone()


def clear_logged_losses() -> None:
    """Forgets what was recorded, and of how many depths: megatron keeps to those of the first model."""
    MTPLossLoggingHelper.tracker.clear()
