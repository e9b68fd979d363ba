"""Ids and labels out of the vocabulary give no plausible number, on one rank as on two that share it."""

import pytest

from tests.engine.test_layouts import measured

pytestmark = pytest.mark.world


def test_what_is_no_token_has_no_loss(installed):
    names = tuple(f"tests.engine.strangers:{name}" for name in ("whole", "shared"))
    seen = measured(names, installed)
    assert not {name: list(map(str, ranks)) for name, ranks in seen.items() if any(o.gap != 0 for o in ranks)}
