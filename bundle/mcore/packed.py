"""The PackedSeqParams that attention reads, from a Packing."""

from megatron.core.packed_seq_params import PackedSeqParams

from bundle.sequences.packing import Packing


def packed_seq_params(packing: Packing) -> PackedSeqParams:
    """Boundaries of the real and of the padded sequences, tail included; the longest counts its padding.

    The padded boundaries are passed always: megatron lays tokens out by them under context parallel.
    """
    longest = packing.padding.longest
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=packing.cu_seqlens,
        cu_seqlens_kv=packing.cu_seqlens,
        cu_seqlens_q_padded=packing.cu_seqlens_padded,
        cu_seqlens_kv_padded=packing.cu_seqlens_padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
