"""The progress of a run of any task, which a checkpoint keeps beside weights and optimizer."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from bundle.engine import Losses


@dataclass
class Progress:
    """Counts of a run: `step` updates, and samples read.

    `skipped_updates` were left out because their gradient was not finite. The unreported counts are those
    since the last report: updates, seconds, FLOPs of one device, and tokens of all replicas. `losses` are
    those of the last report.
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
        """Return the progress that `dump` turned into these values."""
        losses = values["losses"]
        return cls(**{**values, "losses": Losses(**losses) if losses else None})

    def count_update(self, seconds: float, flops: float, tokens: int, samples: int) -> None:
        """Count one update: its seconds, FLOPs of one device, tokens and samples."""
        self.step += 1
        self.consumed_samples += samples
        self.unreported_steps += 1
        self.unreported_seconds += seconds
        self.unreported_flops += flops
        self.unreported_tokens += tokens

    def clear_unreported(self) -> None:
        """Set all unreported counts to 0, for the next report."""
        self.unreported_steps, self.unreported_tokens = 0, 0
        self.unreported_seconds, self.unreported_flops = 0.0, 0.0
