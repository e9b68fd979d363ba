"""What is left of a run when it has been observed."""

import os
import time

import pytest

from bundle.verification.observing import observe
from bundle.verification.orders import Order
from bundle.verification.verifying import decide, everything


def running(process: int) -> bool:
    """Whether there is such a process; an ended one may wait a moment for whoever adopted it."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.world
def test_what_a_run_started_ends_with_it():
    pytest.importorskip("megatron.core")
    found = decide("cpu")
    order = Order(0, "tests.verification.leaving:process", 1, 60, ())
    ((seen,),) = observe([order], everything(found), backend="cpu", root=found.subject.root)
    assert seen.gap is not None, seen
    assert not running(int(seen.gap))
