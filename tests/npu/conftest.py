"""These tests need the real torch-npu and the libraries that `python -m tests.npu` builds."""

import os

import pytest


@pytest.fixture(autouse=True)
def stand_in():
    if "STAND_IN_LIBRARIES" not in os.environ:
        pytest.skip("torch-npu is looked at by `make npu-contract` only")
