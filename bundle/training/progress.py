"""How far a run has come: what a checkpoint keeps beside weights and optimizer."""

from dataclasses import dataclass


@dataclass
class Progress:
    """Steps done, samples read, and updates left out because a gradient was not finite."""

    step: int = 0
    consumed_samples: int = 0
    skipped_updates: int = 0
