"""What a layer keeps of one token for the backward pass, in bytes.

Torch's own operations: read off the tensors that autograd saves (torch.autograd.graph.saved_tensors_hooks).
Fused kernels: memory allocated by a forward pass of Transformer Engine's layers on an H200, within 1 % of
these. The input of a matrix product is not in here: every family keeps it, and what stands before decides its
width.
"""

from bundle.frozen import frozen

FP32 = 4


@frozen
class Kept:
    """The savings of one family of layers; `size` is the bytes of an element in the model's arithmetic."""

    size: int
    fused: bool
    shifted_gate: bool  # an unfused gate adds an offset to b, which makes a copy

    def norm(self, width: int) -> int:
        """An RMS norm: fused, the input as it is; else the input and the normalised input in fp32."""
        return width * self.size + FP32 if self.fused else 2 * width * FP32 + FP32

    def gate(self, width: int) -> int:
        """silu(a) * b of two halves of `width`: fused, the halves alone; else silu(a) too, and b shifted."""
        unfused = 4 if self.shifted_gate else 3
        return (2 if self.fused else unfused) * width * self.size

    def weighted(self, width: int) -> int:
        """The product with a router weight: part of the gate where that is fused."""
        return FP32 if self.fused else width * self.size

    def attention(self, heads: int, groups: int, width: int, value_width: int, cp: int) -> int:
        """Queries, keys, values and a logarithm for each head; the output belongs to the projection after it.

        Unfused it is torch's cpu kernel: fp32, one width, a key head for each query head, an output of its
        own, and the keys and values of all `cp` ranks that share a sequence.
        """
        if self.fused:
            return (heads * width + groups * (width + value_width)) * self.size + heads * FP32
        return heads * ((2 + 2 * cp) * max(width, value_width) + 1) * FP32

    def mask(self, rows: int, cp: int) -> int:
        """The masks of a sequence of which this rank has two chunks, `rows` in all: unfused, in fp32.

        Chunk c of 2·cp sees the c + 1 chunks that end with it; a rank has one from each end.
        """
        return 0 if self.fused or cp == 1 else (rows // 2) ** 2 * (2 * cp + 1) * FP32

    def attention_without_inputs(self, heads: int, width: int, value_width: int, cp: int) -> int:
        """The same where queries, keys and values are discarded after it and computed again.

        Unfused only what was not copied can be: queries and keys of a model in fp32.
        """
        if self.fused:
            return heads * FP32
        shared = 2 * heads * width * FP32 if self.size == FP32 and cp == 1 else 0
        return self.attention(heads, heads, width, value_width, cp) - shared
