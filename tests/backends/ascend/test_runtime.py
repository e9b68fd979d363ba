"""What a job on ascend is told as long as nothing of it has met an NPU."""

import pytest

from bundle import backends
from bundle.capabilities.ascend import ASCEND
from bundle.errors import EnvironmentUnfit


def test_training_is_refused_with_a_reason():
    with pytest.raises(EnvironmentUnfit, match=r"not wired in yet.*emulated"):
        backends.prepare(ASCEND.backend)
