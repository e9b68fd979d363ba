"""The PackedSeqParams that attention reads, from a Packing, and the way back to host integers."""

from itertools import accumulate

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from bundle.sequences.packing import Packing

# Boundaries whose numbers are known on the host, for as long as their tensor lives.
_KNOWN = WeakTensorKeyDictionary()


def packed_seq_params(packing: Packing) -> PackedSeqParams:
    """Boundaries of the real and of the padded sequences, tail included; the longest counts its padding.

    The padded boundaries are passed always: megatron lays tokens out by them under context parallel.
    """
    longest = packing.padding.longest
    _KNOWN[packing.cu_seqlens_padded] = tuple(accumulate((0, *packing.padding.rows)))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=packing.cu_seqlens,
        cu_seqlens_kv=packing.cu_seqlens,
        cu_seqlens_q_padded=packing.cu_seqlens_padded,
        cu_seqlens_kv_padded=packing.cu_seqlens_padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def on_host(boundaries: Tensor) -> tuple[int, ...]:
    """Boundaries as integers, for kernels that want them so.

    Our own padded ones are known and cost nothing; others are read from the device, once in the life of their
    tensor and not once in every layer.
    """
    if boundaries not in _KNOWN:
        _KNOWN[boundaries] = tuple(boundaries.tolist())
    known: tuple[int, ...] = _KNOWN[boundaries]
    return known
