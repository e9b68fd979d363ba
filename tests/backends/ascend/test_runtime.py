"""What a job on ascend is told as long as nothing of it has met an NPU."""

import importlib

import pytest

from bundle.capabilities import ASCEND
from bundle.errors import EnvironmentUnfit


def test_training_is_refused_with_a_reason():
    runtime = importlib.import_module(f"bundle.backends.{ASCEND.backend}.runtime")
    with pytest.raises(EnvironmentUnfit, match=r"not wired in yet.*emulated"):
        runtime.prepare()
