"""Qwen2.5-VL on emulated NPUs: transformers' numbers and gradients in rows and packs, the kernel's masks."""

import json

import pytest

from tests.npu.child import answer
from tests.vision.test_vision import AGREES, OF_GRADIENTS, OF_NATS

pytestmark = pytest.mark.npu

# transformers imports torch-npu where that is installed, which fails without the libraries.
WRITE = """
import sys
from pathlib import Path
from tests.vision import reference
from tests.vision.cases import CASES
reference.write(CASES[0], Path(sys.argv[1], CASES[0].name))
print("written")
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What transformers computes, on the cpu."""
    pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("seen")
    assert answer(WRITE, str(directory)) == "written"
    return directory


@pytest.mark.parametrize("both", ["installed"], indirect=True)
@pytest.mark.parametrize("layout", ["one process", "packed", "packed tp2", "packed cp2"])
def test_images_are_seen_as_transformers_sees_them(both, written, layout):
    out = both.npu.run("tests.npu.seeing", 2 if layout[-1] == "2" else 1, str(written), layout, timeout=1800)
    for seen in (json.loads(rank.splitlines()[-1]) for rank in out):
        of_log_probs, of_gradients, of_nats = seen["far"]
        assert of_log_probs <= AGREES and of_gradients <= OF_GRADIENTS and of_nats <= OF_NATS
        # One causal mask in every call of every layer; packs by their ends alone.
        assert all(
            call["atten_mask"] == [2048, 2048] and call["sparse_mode"] == 3 for call in seen["reached"]
        )
        assert all(("actual_seq_qlen" in call) == layout.startswith("packed") for call in seen["reached"])
        # The tower's sees whole images, or whole windows of them: no mask, by their ends.
        assert len(seen["tower"]) > 1
        for call in seen["tower"]:
            assert "atten_mask" not in call and call["sparse_mode"] == 0
            assert call["actual_seq_qlen"] == call["actual_seq_kvlen"]
        # The mask of the founding defect, given to the same model, is refused before it gets there.
        (said,) = seen["said"]
        assert ("boundaries" if layout.startswith("packed") else "kernel") in said
