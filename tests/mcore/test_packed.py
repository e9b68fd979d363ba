"""Boundaries of packs as host integers, without reading them back."""

import pytest
import torch

pytest.importorskip("megatron.core")

from bundle.mcore.packed import on_host, packed_seq_params
from bundle.sequences.alignment import Alignment
from bundle.sequences.packing import Packing


@pytest.mark.parametrize("cp", [1, 2])
def test_our_own_cost_nothing(monkeypatch, cp):
    packing = Packing.of([5, 3, 9], Alignment(cp=cp, scaling="blockwise"), rank=0)
    parameters = packed_seq_params(packing)
    want = parameters.cu_seqlens_q_padded.tolist()
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: pytest.fail("read back from the device"))
    assert on_host(parameters.cu_seqlens_q_padded) == on_host(parameters.cu_seqlens_kv_padded) == tuple(want)


def test_a_strangers_are_read_once(monkeypatch):
    reads, real = [], torch.Tensor.tolist

    def counted(tensor):
        reads.append(tensor)
        return real(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    ends, others = torch.tensor([0, 4, 9]), torch.tensor([0, 4, 10])
    assert [on_host(ends) for _ in range(3)] == [(0, 4, 9)] * 3
    assert on_host(others) == (0, 4, 10)
    assert len(reads) == 2
