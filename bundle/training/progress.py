"""How far a run has come: what a checkpoint keeps beside weights and optimizer."""

from dataclasses import dataclass

from bundle.engine import Losses


@dataclass
class Progress:
    """Steps done, samples read, and updates left out because a gradient was not finite.

    `unreported_steps` took `unreported_seconds` and `unreported_flops` of a device since the last report;
    `losses` are those reported last.
    """

    step: int = 0
    consumed_samples: int = 0
    skipped_updates: int = 0
    unreported_steps: int = 0
    unreported_seconds: float = 0.0
    unreported_flops: float = 0.0
    losses: Losses | None = None
