"""Every patch that applies, on emulated NPUs: proven there."""

import pytest

from bundle.verification import verify
from bundle.verification.check import Status
from tests.npu.child import DEVICES

pytestmark = pytest.mark.npu


@pytest.mark.parametrize("both", ["installed"], indirect=True)
def test_every_patch_is_proven(both):
    """By ranks that are forked: the verb, which starts new ones, is in test_job."""
    results = list(verify("ascend", tree=both.npu.tree, devices=DEVICES, start=both.npu.start))
    failed = {result.patch: result.reason for result in results if result.status is Status.FAILED}
    assert not failed, "\n".join(f"{patch}: {reason}" for patch, reason in failed.items())
    left = {result.patch: result.reason for result in results if result.status is not Status.PROVEN}
    assert not left and len(results) > 20
