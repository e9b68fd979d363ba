"""Bytes that one micro-batch leaves in one transformer layer of a rank, recomputed modules taken out."""

from bundle.architectures import MLA
from bundle.capabilities import LayerTraits
from bundle.planning.code import SHIFTED_GATE, Code
from bundle.planning.kept import FP32, Kept
from bundle.recipe import Recipe

INDEX = 8  # bytes of an expert's number


class LayerBytes:
    """Counts layers for one recipe; experts are taken to be chosen evenly.

    `tokens` are those of this rank's micro-batch, `stream` the ones of them that it holds between the tensor
    parallel regions: fewer with sequence parallelism.
    """

    def __init__(self, recipe: Recipe, layers: LayerTraits, code: Code) -> None:
        self.recipe, self.layers = recipe, layers
        parallel, recompute = recipe.parallel, recipe.model.recompute
        size = 2 if recipe.model.dtype == "bf16" else 4
        self.kept = Kept(size, layers.fused_kernels, shifted_gate=code.has(SHIFTED_GATE))
        self.cp = parallel.cp
        self.rows = recipe.data.sequence_length // parallel.cp
        self.tokens = self.rows * recipe.train.micro_batch_size
        self.stream = self.tokens // (parallel.tp if parallel.sequence_parallel else 1)
        self.stream_input = self.stream * recipe.architecture.hidden_size * self.kept.size
        selective = recompute is not None and recompute.granularity == "selective"
        self.again = frozenset(recompute.modules if recompute is not None and selective else ())

    def layer(self, experts: bool) -> int:
        """One layer, dense or with experts."""
        latent, fused = self.recipe.architecture.mla, self.layers.fused_norms
        first = self._norm(part_of_projection=fused and latent is None)
        attention = self._latent_attention(latent) if latent else self._attention()
        second = self._norm(part_of_projection=fused and not experts)
        return first + attention + second + (self._experts() if experts else self._dense())

    def _norm(self, *, part_of_projection: bool) -> int:
        """A norm over the residual stream, and its output as the input of what follows."""
        whole = self.stream * self.kept.norm(self.recipe.architecture.hidden_size)
        if "layernorm" in self.again and not part_of_projection:
            return min(whole, self.stream_input)
        return whole + self.stream_input

    def _attention(self) -> int:
        a, tp, size = self.recipe.architecture, self.recipe.parallel.tp, self.kept.size
        heads, groups, width = a.num_attention_heads // tp, a.num_query_groups // tp, a.kv_channels
        total = self._rotation(round(width * a.rotary_fraction))
        if a.qk_layernorm:
            total += self.tokens * (heads + groups) * self.kept.norm(width)
        out = heads * width * size
        if "core_attn" in self.again:
            # The values are a view of queries, keys and values together, which therefore stay.
            return total + self.tokens * ((2 * heads + 3 * groups) * width * size + out)
        total += self.kept.mask(self.rows, self.cp)
        return total + self.tokens * (self.kept.attention(heads, groups, width, width, self.cp) + out)

    def _latent_attention(self, mla: MLA) -> int:
        heads, size = self.recipe.architecture.num_attention_heads // self.recipe.parallel.tp, self.kept.size
        width, value = mla.q_head_dim, mla.v_head_dim
        up_again = "mla_up_proj" in self.again
        total = self._rotation(mla.qk_pos_emb_head_dim)
        for rank in filter(None, (mla.q_lora_rank, mla.kv_lora_rank)):
            # Recomputed from its compressed input, a projection keeps that alone (its norm's, where that is
            # part).
            product = 0 if up_again and self.layers.fused_norms else rank * size
            total += self.stream * (self.kept.norm(rank) + product)
        out = heads * value * size
        if "core_attn" in self.again:
            kept = heads * (2 * width + value) * size
        elif up_again:
            kept = self.kept.attention_without_inputs(heads, width, value, self.cp)
        else:
            kept = self.kept.attention(heads, heads, width, value, self.cp)
        mask = 0 if "core_attn" in self.again else self.kept.mask(self.rows, self.cp)
        return total + mask + self.tokens * (kept + out)

    def _rotation(self, width: int) -> int:
        """Cosines and sines for queries and for keys, of every position once."""
        return self.rows * 4 * width * self.kept.size

    def _dense(self) -> int:
        a = self.recipe.architecture
        if "mlp" in self.again:
            # Its input is the norm's output, or the norm's own input where the norm is part of it.
            return -self.stream_input if self.layers.fused_norms else 0
        return self._gated(self.tokens, a.ffn_hidden_size // self.recipe.parallel.tp)

    def _gated(self, rows: int, width: int) -> int:
        """A gate and the input of the product after it."""
        return rows * (self.kept.gate(width) + width * self.kept.size)

    def _experts(self) -> int:
        """Router, dispatched tokens, experts and shared experts."""
        moe, parallel = self.recipe.architecture.moe, self.recipe.parallel
        assert moe is not None
        if "moe" in self.again:
            return 0
        routing = self.stream * (moe.num_experts * 2 * FP32 + moe.topk * 2 * INDEX)
        # A rank gets as many copies as it sends, and those of the ranks that hold parts of the same experts.
        copies = self.stream * moe.topk * parallel.etp
        width = moe.ffn_hidden_size // parallel.etp
        if "moe_act" in self.again:
            inner = copies * 2 * width * self.kept.size
        else:
            inner = self._gated(copies, width) + copies * self.kept.weighted(width)
        shared = 0
        if moe.shared_ffn_hidden_size and "shared_experts" not in self.again:
            shared = self._gated(self.tokens, moe.shared_ffn_hidden_size // parallel.tp)
        dispatched = copies * self.recipe.architecture.hidden_size * self.kept.size
        return routing + dispatched + inner + shared
