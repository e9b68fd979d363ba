"""Ids and labels out of the vocabulary give no plausible number, on one rank as on two that share it."""

import pytest

from tests.engine.test_layouts import measured

pytestmark = pytest.mark.world


def test_what_is_no_token_has_no_loss():
    pytest.importorskip("megatron.core")
    names = tuple(f"tests.engine.strangers:{name}" for name in ("whole", "shared"))
    assert {
        name: [str(one) for one in ranks if one.gap != 0] for name, ranks in measured(names, None).items()
    } == {name: [] for name in names}
