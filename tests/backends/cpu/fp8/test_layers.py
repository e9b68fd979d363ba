"""The FP8 layers in specs, and the shapes they refuse."""

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.multi_token_prediction import get_mtp_layer_spec
from megatron.core.transformer.transformer_config import MLATransformerConfig

from bundle.backends.cpu.layers import make_fp8_layer
from bundle.backends.cpu.runtime import adapt_spec
from bundle.backends.local import DuplicatedLinear
from bundle.errors import JobFailed
from bundle.recipe.recipe import FP8
from tests.backends.cpu.test_layers import config, inside, local_spec

pytestmark = pytest.mark.usefixtures("megatron")
LINEAR = (ColumnParallelLinear, RowParallelLinear, DuplicatedLinear)
BLOCKWISE, MXFP8 = FP8(scaling="blockwise"), FP8(scaling="mxfp8")


@pytest.fixture
def layer(monkeypatch):
    """Builds a duplicated layer, which needs no process groups."""
    monkeypatch.setattr(parallel_state, "get_amax_reduction_group", lambda **options: None)

    def build(fp8, inputs, outputs, dtype=torch.float32, **options):
        settings = config(perform_initialization=False, params_dtype=dtype)
        made = make_fp8_layer(DuplicatedLinear, fp8)(
            inputs, outputs, config=settings, init_method=torch.nn.init.normal_, **options
        )
        torch.nn.init.normal_(made.weight)
        return made

    return build


@pytest.mark.parametrize("experts", [None, 4])
def test_every_linear_layer_of_a_spec_is_replaced(experts):
    spec = local_spec(config(MLATransformerConfig, num_moe_experts=experts, normalization="RMSNorm"))
    mtp = get_mtp_layer_spec(spec, use_transformer_engine=False)
    for given in (spec, mtp):
        plain, fp8 = dict(inside(adapt_spec(given))), dict(inside(adapt_spec(given, BLOCKWISE)))
        replaced = {path for path, value in plain.items() if any(value is layer for layer in LINEAR)}
        assert len(replaced) >= 7
        for path, value in plain.items():
            assert fp8[path] is (make_fp8_layer(value, BLOCKWISE) if path in replaced else value), path


def test_a_replaced_layer_passes_for_the_one_that_megatron_looks_for():
    fp8 = make_fp8_layer(DuplicatedLinear, BLOCKWISE)
    assert fp8 in [DuplicatedLinear] and fp8 not in [ColumnParallelLinear]
    assert make_fp8_layer(DuplicatedLinear, BLOCKWISE) is fp8 is not make_fp8_layer(DuplicatedLinear, MXFP8)


@pytest.mark.parametrize(
    ("fp8", "inputs", "outputs", "rows", "wrong"),
    [
        (BLOCKWISE, 64, 48, 16, []),
        (BLOCKWISE, 64, 48, 24, ["24 rows"]),
        (BLOCKWISE, 40, 72, 16, ["40 input features", "72 output features"]),
        (MXFP8, 64, 48, 16, ["48 output features", "16 rows"]),
        (MXFP8, 64, 96, 32, []),
    ],
)
def test_shapes_that_no_fp8_product_takes_are_refused_together(layer, fp8, inputs, outputs, rows, wrong):
    made = layer(fp8, inputs, outputs, tp_comm_buffer_name="kv_down_proj")
    x = torch.randn(rows // 8, 8, inputs)
    if not wrong:
        assert made(x)[0].shape == (rows // 8, 8, outputs)
        return
    with pytest.raises(JobFailed) as error:
        made(x)
    assert [violation.partition(" on this rank")[0] for violation in error.value.violations] == wrong
    assert "kv_down_proj" in str(error.value) and str([rows // 8, 8, inputs]) in str(error.value)
    if f"{rows} rows" in wrong:
        assert "recipe.alignment" in error.value.violations[-1]


def test_experts_pad_their_rows_by_themselves(layer):
    made = layer(BLOCKWISE, 64, 48, is_expert=True)
    for rows in (7, 0):
        x = torch.randn(rows, 64, requires_grad=True)
        made(x)[0].sum().backward()
        assert x.grad.shape == (rows, 64)
    with pytest.raises(JobFailed, match="40 input features"):
        layer(BLOCKWISE, 40, 48, is_expert=True)(torch.randn(7, 40))


def test_frozen_weights_take_part_and_get_no_gradient(layer):
    made = layer(FP8(scaling="tensorwise"), 64, 48, dtype=torch.bfloat16)
    x = torch.randn(16, 64).bfloat16().requires_grad_()
    (whole,) = torch.autograd.grad(made(x)[0].square().sum(), x)
    made.weight.requires_grad_(False)
    made(x)[0].square().sum().backward()
    assert made.weight.grad is None and torch.equal(x.grad, whole)


def test_megatrons_own_choice_of_a_product_is_not_taken(layer):
    """0.12 and 0.13 assign a function to `_forward_impl` in every forward pass."""
    made = layer(BLOCKWISE, 64, 48)
    x = torch.randn(16, 64)
    before = made(x)[0]
    made._forward_impl = None
    assert torch.equal(made(x)[0], before) and not torch.equal(before, x @ made.weight.t())
