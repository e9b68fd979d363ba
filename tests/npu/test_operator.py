"""The real npu_fusion_attention, as far as it is there without a device, against the emulated one."""

import json

import pytest

from bundle.environment.compatibility import EMULATED_ACCELERATOR
from tests.backends.ascend.contract import SCHEMA, npu_fusion_attention
from tests.npu.child import answer, child
from tests.npu.refusing import answers

pytestmark = pytest.mark.npu


@pytest.fixture(scope="module")
def real():
    return json.loads(answer("from tests.npu.looking import main; main()"))


def test_the_schema_is_the_emulated_ones(real):
    assert real["schema"] == SCHEMA


def test_names_and_defaults_are_the_emulated_ones(real):
    assert real["arguments"]["real"] == real["arguments"]["emulated"]


def test_torch_npu_calls_the_operator_of_torch_ops(real):
    assert real["same"] is True


def test_results_have_the_shapes_of_the_emulated_ones(real):
    assert set(real["results"]) == {"BSH", "SBH", "BSND", "BNSD", "TND"}
    for result in real["results"].values():
        assert result["real"] == result["emulated"]


def test_the_real_shape_function_checks_nothing(real):
    """Why shapes alone prove nothing, and the emulated operator checks the contract."""
    assert real["wrong mask"] == "taken"


def test_our_call_goes_through_the_real_schema(proven):
    """Every argument by the name and the type that torch_npu declares; the result is the emulated one."""
    program = """
import torch
from bundle.backends.ascend.attention import AttentionCallShape, call_fused_attention, build_mask_arguments
from bundle.environment.compatibility import EMULATED_ACCELERATOR
from tests.backends.ascend.contract import registered
library = registered()
torch.manual_seed(0)
q, k, v = (torch.randn(12, 4, d).requires_grad_() for d in (24, 24, 16))
rows = AttentionCallShape(12, 12, q.device, boundaries=((0, 5, 12), (0, 5, 12)))
options = {'heads': 4, 'scale': 0.3, 'dropout': 0.0}
out = call_fused_attention(q, k, v, build_mask_arguments(None, rows, causal=True), **options)
parts = []
for a, b in ((0, 5), (5, 12)):
    x = [y[a:b].transpose(0, 1) for y in (q, k, v)]
    one = torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True, scale=0.3)
    parts.append(one.transpose(0, 1))
want = torch.cat(parts)
hidden = torch.zeros(1, 1, 12, 12, dtype=torch.bool)
whole = [x.unsqueeze(1).flatten(2) for x in (q, k, v)]
square, plain = (
    call_fused_attention(
        *whole, build_mask_arguments(mask, AttentionCallShape(12, 12, q.device), causal=True), **options
    )
    for mask in (hidden, None)
)
gradients = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, want)]
close = all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*gradients))
print(torch.allclose(out, want, atol=1e-5), close, torch.allclose(square, plain, atol=1e-5))
"""
    assert answer(program) == "True True True"
    proven("attention is called by torch-npu's own schema", backend="ascend", device=EMULATED_ACCELERATOR)


def test_without_torch_npu_the_bundle_says_so():
    program = """
import torch
from bundle.backends.ascend.attention import KernelMaskArguments, call_fused_attention
x = torch.zeros(4, 1, 8)
call_fused_attention(x, x, x, KernelMaskArguments(None, 0), heads=1, scale=1.0, dropout=0.0)
"""
    ended = child(program, autoload=False)
    assert ended.code == 1 and "EnvironmentUnfit" in ended.err and "torch-npu" in ended.err


def test_op_plugin_and_the_emulated_one_refuse_the_same_calls():
    """What op-plugin takes gets as far as the kernel, which the stand-in does not have."""
    real = json.loads(answer("from tests.npu.refusing import main; main()"))
    emulated = answers(npu_fusion_attention, "cpu")
    assert {name for name, said in emulated.items() if said == "done"} == {
        name for name, said in real.items() if "aclnnFlashAttention" in said
    }
    assert real["good"].startswith("aclnnFlashAttentionScore ")
    assert real["good packed"].startswith("aclnnFlashAttentionVarLenScore ")
    assert "sparse_mode" in real["mode"] and "[0,6]" in real["mode"] and real["mode"].endswith(" 7")
