"""MindSpeed's adaptor over the real torch-npu: what it makes of torch and of megatron-core.

$MINDSPEED names a checkout of MindSpeed's branch core_r0.15.3 (on no package index); $BUNDLE_RELEASES has
megatron-core 0.15.3. torch-npu 2.13 stands under a branch documented for 2.7.1: evidence for imports only.
"""

import json
import os
from pathlib import Path

import pytest

from tests.npu.child import answer

pytestmark = pytest.mark.npu

ADAPT = """
import json, sys
from unittest.mock import MagicMock
sys.argv = ["train", "--use-flash-attn"]  # MindSpeed reads its options from there when it is imported
import torch
# The graph compiler's package wants libraries of CANN; nothing here compiles a graph.
for name in ("torchair", "torchair.ge", "torchair.ge_concrete_graph", "torchair.ge._ge_graph"):
    sys.modules[name] = MagicMock(name=name, __spec__=None)
import mindspeed.megatron_adaptor
from mindspeed.patch_utils import MindSpeedPatchesManager
from megatron.core.transformer.dot_product_attention import DotProductAttention
import transformer_engine
print(json.dumps({
    "patches": len(MindSpeedPatchesManager.patches_info),
    "cuda": torch.cuda.is_available(),
    "attention": DotProductAttention.forward.__module__,
    "transformer_engine": str(getattr(transformer_engine, "__file__", None)),
}))
"""


@pytest.fixture(scope="module")
def adapted():
    checkout, releases = os.environ.get("MINDSPEED"), os.environ.get("BUNDLE_RELEASES")
    if not checkout:
        pytest.skip("MINDSPEED names no checkout of MindSpeed's branch core_r0.15.3")
    megatron = Path(releases or "", "0.15.3")
    if not megatron.is_dir():
        pytest.skip("megatron-core 0.15.3 is not under BUNDLE_RELEASES")
    return json.loads(answer(ADAPT, path=[checkout, str(megatron)]))


def test_it_replaces_attention_and_tells_that_there_is_transformer_engine(adapted):
    """Two things that must be asked before it is imported, or not at all."""
    assert adapted["attention"].startswith("mindspeed.")
    assert "mindspeed" in adapted["transformer_engine"] or "dummy" in adapted["transformer_engine"]
    assert adapted["cuda"] is True and adapted["patches"] > 50
