"""How far a run has come: what a checkpoint keeps beside weights and optimizer, for every task."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from bundle.engine import Losses


@dataclass
class Progress:
    """Updates made, samples read, and updates left out because a gradient was not finite.

    `unreported_steps` took `unreported_seconds` and `unreported_flops` of a device for `unreported_tokens`
    since the last report; `losses` are those reported last.
    """

    step: int = 0
    consumed_samples: int = 0
    skipped_updates: int = 0
    unreported_steps: int = 0
    unreported_seconds: float = 0.0
    unreported_flops: float = 0.0
    unreported_tokens: int = 0
    losses: Losses | None = None

    def dump(self) -> dict[str, Any]:
        """Return plain values that JSON keeps exactly."""
        return asdict(self)

    @classmethod
    def from_dump(cls, values: Mapping[str, Any]) -> Self:
        """Return what `dump` was called on."""
        losses = values["losses"]
        return cls(**{**values, "losses": Losses(**losses) if losses else None})

    def count_update(self, seconds: float, flops: float, tokens: int, samples: int) -> None:
        """Count one update of the weights: its seconds, FLOPs of a device, tokens and samples."""
        self.step += 1
        self.consumed_samples += samples
        self.unreported_steps += 1
        self.unreported_seconds += seconds
        self.unreported_flops += flops
        self.unreported_tokens += tokens

    def clear_unreported(self) -> None:
        """Begin the next report."""
        self.unreported_steps, self.unreported_tokens = 0, 0
        self.unreported_seconds, self.unreported_flops = 0.0, 0.0
