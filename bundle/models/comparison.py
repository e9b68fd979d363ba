"""How far the tensors of two sources are apart, one after the other."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bundle.models.sources import Source

_AT_ONCE = 2**22  # values that are compared in float64


@dataclass(frozen=True, slots=True)
class Difference:
    """What is not alike of one tensor.

    `largest` is the largest absolute difference of two values, `relative` the same divided by the largest
    magnitude of the first; of shapes and tensors that only one has there is none.
    """

    name: str
    kind: Literal["only in the first", "only in the second", "shape", "dtype", "values"]
    first: str = ""
    second: str = ""
    largest: float | None = None
    relative: float | None = None

    def __str__(self) -> str:
        against = f": {self.first} against {self.second}" if self.first else ""
        apart = "" if self.largest is None else f"; largest {self.largest:.3g}, relative {self.relative:.3g}"
        return f"{self.name}: {self.kind}{against}{apart}".replace(": values;", ": values differ,")


def differences(first: Source, second: Source) -> Iterator[Difference]:
    """Every tensor that is not in both alike: shape, kind of numbers, values. NaN equals NaN."""
    for name in dict.fromkeys((*first.tensors, *second.tensors)):
        if name not in second.tensors:
            yield Difference(name, "only in the first")
        elif name not in first.tensors:
            yield Difference(name, "only in the second")
        else:
            yield from _of_both(name, first, second)


def _of_both(name: str, first: Source, second: Source) -> Iterator[Difference]:
    (shape, dtype), (other_shape, other_dtype) = first.tensors[name], second.tensors[name]
    if shape != other_shape:
        yield Difference(name, "shape", str(list(shape)), str(list(other_shape)))
        return
    largest, relative = _apart(first.read(name), second.read(name))
    if dtype != other_dtype:
        ours, theirs = (str(kind).removeprefix("torch.") for kind in (dtype, other_dtype))
        yield Difference(name, "dtype", ours, theirs, largest, relative)
    elif largest != 0:
        yield Difference(name, "values", largest=largest, relative=relative)


def _apart(first: Tensor, second: Tensor) -> tuple[float, float]:
    """(largest absolute difference, the same divided by the first's largest magnitude)."""
    largest = magnitude = 0.0
    for a, b in zip(first.flatten().split(_AT_ONCE), second.flatten().split(_AT_ONCE), strict=True):
        one, other = a.double(), b.double()
        distance = torch.where(
            (one == other) | (one.isnan() & other.isnan()), 0.0, (one - other).abs().nan_to_num(torch.inf)
        )
        largest = max(largest, float(distance.max()))
        magnitude = max(magnitude, float(one.abs().nan_to_num(0.0).max()))
    return largest, 0.0 if largest == 0 else largest / magnitude if magnitude else torch.inf
