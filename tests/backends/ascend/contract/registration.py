"""Puts the emulated operator where torch_npu puts the real one: torch.ops.npu.npu_fusion_attention."""

import functools

import torch

from tests.backends.ascend.contract.attention import npu_fusion_attention

NAME = "npu_fusion_attention"
# As torch_npu 2.13.0 declares it; `make npu-contract` compares it with the wheel.
SCHEMA = (
    f"npu::{NAME}(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? pse=None, "
    "Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., "
    "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, "
    "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, "
    'bool gen_mask_parallel=True, bool sync=False, str softmax_layout="", Tensor? sink=None, '
    "Tensor? dropout_mask=None, int seed=0, int offset=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
)


@functools.cache
def registered() -> torch.library.Library:
    """The library that holds it, made once in a process; for tensors of any device, differentiable.

    Where torch_npu is loaded its own declaration stands, and only tensors of the cpu come here.
    """
    if torch._C._dispatch_has_kernel(f"npu::{NAME}"):
        library = torch.library.Library("npu", "IMPL")
        library.impl(NAME, npu_fusion_attention, "AutogradCPU")
        return library
    library = torch.library.Library("npu", "DEF")
    library.define(SCHEMA.removeprefix("npu::"))
    library.impl(NAME, npu_fusion_attention, "CompositeImplicitAutograd")
    return library
