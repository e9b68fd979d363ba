"""The emulated operator for the tests that ask for it: the backend does not know that it is emulated."""

import pytest

from tests.backends.ascend.contract import registered


@pytest.fixture
def emulated():
    """torch.ops.npu.npu_fusion_attention exists, and checks its contract."""
    registered()
