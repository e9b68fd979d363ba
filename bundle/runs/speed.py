"""How fast a run is: model FLOP/s of a device against what it can, and the most memory that it held."""

import resource
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from bundle import capabilities
from bundle.planning.size import model_size
from bundle.recipe import Recipe


class Speed:
    """Counts for one rank: what its replica was fed is shared by the ranks of the replica."""

    def __init__(self, recipe: Recipe, backend: str, device: torch.device) -> None:
        parallel = recipe.parallel
        self._size, self._ranks = model_size(recipe.architecture), parallel.tp * parallel.cp * parallel.pp
        self._device = device
        self._peak: float | None = None  # FLOP/s of the arithmetic that is used, where it is known
        if device.type == "cuda" and recipe.model.dtype == "bf16" and recipe.model.fp8 is None:
            peak = capabilities.of(backend).peak(torch.cuda.get_device_name(device))
            self._peak = peak.bf16 if peak else None

    def flops(self, lengths: Sequence[int]) -> float:
        """This rank's share of the model FLOPs of training on sequences of these lengths."""
        tokens = np.asarray(lengths, np.int64)
        pairs = int((tokens * (tokens + 1) // 2).sum())
        return self._size.step_flops(int(tokens.sum()), pairs) / self._ranks

    def gauges(self, flops: float, seconds: float) -> Mapping[str, float]:
        """FLOP/s of a device (TFLOP/s; MFU where the peak is known) and the peak of its memory in bytes.

        On the cpu that is the resident memory of this process.
        """
        found = {"train/tflops_per_device": flops / seconds / 1e12}
        if self._peak is not None:
            found["train/mfu"] = flops / seconds / self._peak
        if self._device.type == "cuda":
            found["memory/peak_bytes"] = torch.cuda.max_memory_allocated(self._device)
        else:
            found["memory/peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return found
