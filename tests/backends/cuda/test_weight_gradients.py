import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
import torch

from bundle.backends.cuda.weight_gradients import (
    EXTENSION_NAME,
    add_weight_gradient,
    can_accumulate,
    find_accumulating_product,
    provide_extension,
)


@pytest.fixture
def modules(monkeypatch):
    """The imported modules, without the extension; restored after the test."""
    monkeypatch.setattr(sys, "modules", {k: v for k, v in sys.modules.items() if k != EXTENSION_NAME})
    return sys.modules


def test_a_gradient_is_added_in_place_to_what_is_there():
    inputs, gradients = torch.randn(37, 5), torch.randn(37, 3) * 8
    start = torch.randn(3, 5) + 7
    total = start.clone()
    for times in (1, 2):
        add_weight_gradient(inputs, gradients, total)
        expected = start.double() + times * torch.einsum("to,ti->oi", gradients.double(), inputs.double())
        torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-4)


def test_bf16_is_given_to_the_product_that_sums_in_fp32(monkeypatch):
    calls = []
    addmm = SimpleNamespace(dtype_out=lambda *given, **named: calls.append((given, named)))
    monkeypatch.setattr(torch.ops.aten, "addmm", addmm)
    inputs, gradients, total = torch.randn(7, 5).bfloat16(), torch.randn(7, 3).bfloat16(), torch.zeros(3, 5)
    add_weight_gradient(inputs, gradients, total)
    [((start, left, right, dtype), named)] = calls
    assert start is total
    assert named == {"out": total}
    assert (left.shape, right is inputs, dtype) == ((3, 7), True, torch.float32)


def test_megatron_finds_a_module_of_this_name(modules):
    provide_extension()
    assert importlib.util.find_spec(EXTENSION_NAME) is not None
    module = importlib.import_module(EXTENSION_NAME)
    assert module.wgrad_gemm_accum_fp32 is module.wgrad_gemm_accum_fp16 is add_weight_gradient


def test_an_installed_extension_is_left_alone(modules, tmp_path, monkeypatch):
    (tmp_path / f"{EXTENSION_NAME}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    provide_extension()
    assert EXTENSION_NAME not in modules


def test_nothing_is_provided_where_torch_has_no_such_product(modules, monkeypatch):
    monkeypatch.setattr(torch.ops.aten, "addmm", SimpleNamespace())
    provide_extension()
    assert EXTENSION_NAME not in modules


@pytest.mark.parametrize(
    ("product", "can"),
    [
        (lambda inputs, gradients, total: total.addmm_(gradients.t().float(), inputs.float()), True),
        (lambda inputs, gradients, total: total.copy_(gradients.t().float() @ inputs.float()), False),
        (add_weight_gradient, False),  # torch has this product of bf16 on GPUs alone
    ],
)
def test_a_product_is_tried_before_megatron_is_told_of_it(product, can, modules):
    modules[EXTENSION_NAME] = SimpleNamespace(
        wgrad_gemm_accum_fp32=product, __spec__=ModuleSpec(EXTENSION_NAME, None)
    )
    assert can_accumulate(torch.device("cpu")) is can
    assert find_accumulating_product(torch.device("cpu")) is (product if can else None)


def test_nothing_is_accumulated_without_the_extension(modules):
    assert not can_accumulate(torch.device("cpu"))


@pytest.mark.parametrize("sequence", [1, 6])
def test_megatrons_output_layer_adds_its_gradient_through_it(sequence, monkeypatch):
    layers = pytest.importorskip("megatron.core.tensor_parallel.layers")
    extension = SimpleNamespace(wgrad_gemm_accum_fp32=add_weight_gradient)
    monkeypatch.setattr(layers, EXTENSION_NAME, extension, raising=False)
    weight = torch.nn.Parameter(torch.randn(11, 4))
    weight.main_grad = torch.full((11, 4), 0.25)
    inputs, gradients = torch.randn(sequence, 2, 4), torch.randn(sequence, 2, 11)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    output = layers.linear_with_grad_accumulation_and_async_allreduce(
        input=inputs.requires_grad_(),
        weight=weight,
        bias=None,
        gradient_accumulation_fusion=True,
        allreduce_dgrad=False,
        sequence_parallel=False,
        tp_group=group,
    )
    output.backward(gradients)
    expected = 0.25 + torch.einsum("sbo,sbi->oi", gradients.double(), inputs.detach().double())
    torch.testing.assert_close(weight.main_grad.double(), expected, rtol=1e-5, atol=1e-5)
    assert weight.grad is None
