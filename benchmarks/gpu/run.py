"""What one run of a case gave, as a rank writes it down and the comparisons read it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

# Steps in which kernels are compiled and chosen.
WARM_UP = 6


@dataclass(frozen=True)
class Run:
    """Per step: [main loss, MTP losses..] in nats, the gradient norm, wall seconds. Bytes: of one device."""

    name: str
    losses: list[list[float]]
    grad_norms: list[float]
    seconds: list[float]
    tokens: int  # of a step
    flops: float  # of a step
    peak_bytes: int
    planned_bytes: int
    versions: dict[str, str]

    @property
    def step_seconds(self) -> float:
        """Seconds of a step after the warm-up."""
        return median(self.seconds[WARM_UP:] or self.seconds)

    def write(self, path: Path) -> None:
        """Writes the run as JSON."""
        path.write_text(json.dumps(asdict(self)))


def read(path: Path) -> Run:
    """The run that was written there."""
    return Run(**json.loads(path.read_text()))
