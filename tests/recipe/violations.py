"""What is wrong with a recipe, each without the place that it was written at."""

import re

import pytest

from bundle.errors import UsageError
from bundle.recipe import load

_PLACE = re.compile(r"^(--set .*?|\S+\.yaml:\d+): (?=[a-z_.0-9]+: )")


def without_place(violation: str) -> str:
    """Return `key: what is wrong`."""
    return _PLACE.sub("", violation)


def collect_violations(name: str, *overrides: str) -> list[str]:
    """Return the violations of a recipe with these overrides."""
    with pytest.raises(UsageError) as caught:
        load(name, overrides)
    assert caught.value.code == 2
    return list(map(without_place, caught.value.violations))
