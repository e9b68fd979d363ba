"""`frozen` against what it replaces: a class of `dataclass(frozen=True)` with the same fields."""

import copy
import dataclasses
import pickle
from dataclasses import FrozenInstanceError, dataclass, field
from functools import cached_property
from typing import Any

import pytest

from bundle.frozen import frozen, frozen_by_name


@frozen
class Size:
    width: int
    height: int = 2
    notes: tuple[str, ...] = field(default_factory=tuple)

    @cached_property
    def area(self) -> int:
        return self.width * self.height


@frozen
class Other:
    width: int
    height: int = 2
    notes: tuple[str, ...] = ()


@frozen_by_name
class Named:
    width: int = 1
    height: int


def test_it_compares_hashes_and_prints_as_a_dataclass_does():
    theirs: Any = dataclass(frozen=True)(type("Size", (), {"__annotations__": {"width": int, "height": int}}))
    ours: Any = frozen(type("Size", (), {"__annotations__": {"width": int, "height": int}}))
    assert repr(ours(1, 2)) == repr(theirs(1, 2)) == "Size(width=1, height=2)"
    assert hash(ours(1, 2)) == hash(theirs(1, 2))
    assert Size(1) == Size(1, 2, ()) != Size(2)
    assert Size(1) != Other(1)  # type: ignore[comparison-overlap]
    assert len({Size(1), Size(1), Size(2)}) == 2


def test_nothing_of_it_changes():
    size = Size(3)
    assert size.area == 6
    for change in (
        lambda: setattr(size, "width", 4),
        lambda: setattr(size, "area", 4),
        lambda: setattr(size, "depth", 4),
        lambda: delattr(size, "width"),
    ):
        with pytest.raises(FrozenInstanceError):
            change()
    assert (size.width, size.area) == (3, 6)


def test_what_is_computed_once_is_no_part_of_the_value():
    size = Size(3)
    assert size.area == 6
    assert size == Size(3)
    assert hash(size) == hash(Size(3))


def test_the_functions_of_dataclasses_and_copies_work():
    size = Size(3, notes=("a",))
    assert dataclasses.replace(size, height=5) == Size(3, 5, ("a",))
    assert dataclasses.asdict(size) == {"width": 3, "height": 2, "notes": ("a",)}
    assert copy.deepcopy(size) == pickle.loads(pickle.dumps(size)) == size


def test_by_name_means_only_by_name():
    assert Named(height=2) == Named(width=1, height=2)
    with pytest.raises(TypeError):
        Named(1, 2)  # type: ignore[misc]
