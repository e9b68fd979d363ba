"""The replacements without which megatron does not train on a cpu."""

import pytest
import torch

from bundle.replacements import gradients, mla, moe


def test_splits_become_numbers_wherever_the_tensor_was():
    def original(tensor, as_numpy=False, record_stream=False):
        """As megatron has it: only what comes from a GPU is converted."""
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) and tensor.is_meta else tensor

    move = moe.convert_cpu_splits_to_numpy(original)
    splits = torch.tensor([3, 0, 5])
    assert move(splits, as_numpy=True).tolist() == [3, 0, 5]
    assert not torch.is_tensor(move(splits, True, record_stream=True))
    assert move(splits) is splits
    assert move(None, as_numpy=True) is None


@pytest.mark.usefixtures("megatron")
def test_megatrons_own_function_leaves_a_tensor_on_the_cpu():
    from megatron.core.transformer.moe.moe_utils import maybe_move_tensor_to_cpu

    splits = torch.tensor([3, 0, 5])
    assert torch.is_tensor(maybe_move_tensor_to_cpu(splits, as_numpy=True))
    assert moe.convert_cpu_splits_to_numpy(maybe_move_tensor_to_cpu)(splits, as_numpy=True).tolist() == [
        3,
        0,
        5,
    ]


def test_nothing_to_quantize_is_not_quantized():
    calls = []

    def original(params, *rest):
        calls.append((params, rest))
        raise RuntimeError("needs Transformer Engine")

    quantize = gradients.skip_empty_quantization(original)
    assert quantize([], [], [], "group") is None and not calls
    with pytest.raises(RuntimeError, match="Transformer Engine"):
        quantize(["fp8"], ["fp32"], [0], "group")


@pytest.mark.usefixtures("megatron")
def test_the_names_that_transformer_engine_would_have_bound():
    from bundle.backends.local import DuplicatedLinear

    assert list(map(moe.disable_te_router_gemm, [None])) == [None]
    assert mla.provide_duplicated_linear(None) is DuplicatedLinear
