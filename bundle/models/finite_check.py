"""Whether the numbers of published tensors are numbers: NaN and infinities are named by tensor and file.

A model with one of them computes nothing else, and training could only say that its loss is no number.
"""

import numpy as np
import torch
from torch import Tensor

from bundle.errors import UsageError, format_count
from bundle.models.mapped_files import MappedFiles
from bundle.models.publishing import TORCH_DTYPE_BY_SAFETENSORS_NAME
from bundle.pretrained import PretrainedWeights
from bundle.pretrained.directory import MX_SCALES_SUFFIX, limit_violations

# Integers with the bits of each kind of numbers, and where, of either sign, those that are not finite begin.
_NONFINITE_BIT_THRESHOLDS = {
    torch.bfloat16: (torch.int16, np.uint16, 0x7F80),
    torch.float16: (torch.int16, np.uint16, 0x7C00),
    torch.float32: (torch.int32, np.uint32, 0x7F800000),
    torch.float8_e4m3fn: (torch.int8, np.uint8, 0x7F),
}
# A scale of MXFP4 is an exponent, 127 more; from here on the largest value of a block is beyond bf16.
_MAX_MXFP4_SCALE = 252
_MAX_SHOWN = 20  # tensors
_CHUNK_VALUES = 2**20  # values, which a core keeps near for whoever reads them next


class FiniteCheck:
    """Looks at tensors of a directory as they are read."""

    def __init__(self, weights: PretrainedWeights) -> None:
        self._weights = weights
        self._damaged: dict[str, None] = {}

    def record_nonfinite_part(self, name: str, stored: Tensor) -> None:
        """Check a part of a stored tensor."""
        if name not in self._damaged and not is_finite(stored):
            self._damaged[name] = None

    def refuse_nonfinite_tensors(self) -> None:
        """Raise UsageError with every tensor that has values which are not finite."""
        if self._damaged:
            raise UsageError(
                f"{self._weights.directory}: some weights are NaN, infinite or too large. Download these"
                " files again, or use weights from before training failed",
                limit_violations([self._describe(name) for name in self._damaged], _MAX_SHOWN),
            )

    def _describe(self, name: str) -> str:
        entry = self._weights.entries[name].untransposed_entry
        stored = _read_stored(self._weights, name, MappedFiles()).flatten()
        count, first = 0, -1
        for start in range(0, len(stored), _CHUNK_VALUES):
            part = stored[start : start + _CHUNK_VALUES]
            wrong = part > _MAX_MXFP4_SCALE if part.dtype is torch.uint8 else ~part.float().isfinite()
            count += int(wrong.sum())
            first = start + int(wrong.byte().argmax()) if first < 0 < count else first
        position = [int(index) for index in np.unravel_index(first, entry.shape)]
        is_scale = stored.dtype is torch.uint8
        limit = f"; MXFP4 scales above {_MAX_MXFP4_SCALE} do not fit bf16" if is_scale else ""
        return (
            f"{name} in {entry.file.name}: {count:,} of {format_count(len(stored), 'value')}"
            f" {'is' if count == 1 else 'are'} wrong. The first, at index {position}, is"
            f" {stored[first]:g}{limit}"
        )


def is_finite(stored: Tensor) -> bool:
    """Return whether all numbers are finite; those of uint8 are scales of MXFP4."""
    if stored.dtype is torch.uint8:
        return not bool((stored > _MAX_MXFP4_SCALE).any())
    signed, unsigned, begin = _NONFINITE_BIT_THRESHOLDS[stored.dtype]
    bits = np.atleast_1d(stored.view(signed).numpy())
    sign = 1 << (8 * bits.itemsize - 1)
    rows = max(1, _CHUNK_VALUES * len(bits) // max(1, bits.size))
    for start in range(0, len(bits), rows):
        part = bits[start : start + rows]
        # Whatever is not finite has the highest bit of the exponent, and so have only numbers from 2 on:
        # most tensors have none, and are read once.
        if int(np.bitwise_or.reduce(part, axis=None)) & sign >> 1 and not (
            int(part.max()) < begin and int(part.view(unsigned).max()) < begin + sign
        ):
            return False
    return True


def refuse_nonfinite_weights(weights: PretrainedWeights) -> None:
    """Raise UsageError with every tensor of a directory that has values which are not finite."""
    check, files = FiniteCheck(weights), MappedFiles()
    ordered = sorted(weights.entries.items(), key=lambda item: (item[1].file, item[1].start))
    for name, entry in ordered:
        if entry.dtype in TORCH_DTYPE_BY_SAFETENSORS_NAME or name.endswith(MX_SCALES_SUFFIX):
            check.record_nonfinite_part(name, _read_stored(weights, name, files))
    check.refuse_nonfinite_tensors()


def _read_stored(weights: PretrainedWeights, name: str, files: MappedFiles) -> Tensor:
    """Return a tensor as its file has it."""
    entry = weights.entries[name]
    kind = TORCH_DTYPE_BY_SAFETENSORS_NAME.get(entry.dtype, torch.uint8)
    return files.read_bytes(name, entry).view(kind).view(entry.untransposed_entry.shape)
