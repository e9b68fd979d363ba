"""What two sources differ in is said tensor by tensor, with how far values are apart."""

import math

import pytest
import torch

from bundle.models import conversion
from bundle.models.conversion import find_differences


class Held:
    """A source of tensors in memory."""

    def __init__(self, **held: torch.Tensor) -> None:
        self._held = held
        self.tensors = {name: (tuple(value.shape), value.dtype) for name, value in held.items()}

    def read(self, name: str) -> torch.Tensor:
        return self._held[name]


def found(first, second):
    return {difference.name: difference for difference in find_differences(first, second)}


def test_equal_sources_have_no_difference():
    odd = torch.tensor([1.0, math.nan, math.inf, -0.0])
    assert not found(Held(a=odd, b=torch.ones(2, 3)), Held(b=torch.ones(2, 3), a=odd.clone()))


def test_names_shapes_and_kinds_of_numbers_are_told_apart(messages):
    first = Held(a=torch.ones(2), b=torch.ones(2, 3), c=torch.ones(3), d=torch.ones(1))
    second = Held(b=torch.ones(3, 2), c=torch.ones(3).bfloat16(), d=torch.ones(1), e=torch.ones(2))
    seen = found(first, second)
    kinds = {name: difference.kind.split()[-1] for name, difference in seen.items()}
    assert kinds == {"a": "first", "b": "shape", "c": "dtype", "e": "second"}
    assert (seen["b"].first, seen["b"].second) == ("[2, 3]", "[3, 2]")
    assert (seen["c"].first, seen["c"].second, seen["c"].largest) == ("float32", "bfloat16", 0)
    for difference in seen.values():
        messages(difference)


@pytest.mark.parametrize("at_once", [2, 2**22])
def test_values_are_as_far_apart_as_the_farthest(monkeypatch, at_once, messages):
    monkeypatch.setattr(conversion, "_COMPARISON_CHUNK_VALUES", at_once)
    first, second = torch.tensor([[1.0, -8.0, 2.0], [0.0, 4.0, 3.0]]), torch.zeros(2, 3)
    second.copy_(first)
    second[1, 1] += 2
    second[0, 0] -= 1
    (difference,) = found(Held(a=first), Held(a=second)).values()
    assert (difference.kind, difference.largest, difference.relative) == ("values", 2.0, 0.25)
    messages(difference)


def test_a_number_against_none_is_infinitely_far():
    (difference,) = found(Held(a=torch.ones(2)), Held(a=torch.tensor([1.0, math.nan]))).values()
    assert difference.largest == math.inf
