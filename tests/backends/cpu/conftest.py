"""The facade for the tests of this directory, taken off after each module."""

import pytest

from bundle.backends.cpu.runtime import facade


@pytest.fixture(autouse=True, scope="module")
def _no_facade_left():
    """Other tests of the process must meet the torch they expect."""
    yield
    facade.uninstall()


@pytest.fixture
def installed():
    """Megatron may be called in this test."""
    facade.install()
    with facade.megatron_calls():
        yield
    facade.uninstall()
