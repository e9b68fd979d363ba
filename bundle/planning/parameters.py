"""Every parameter of a model chunk as megatron-core creates it: name, shape, how it is cut, in registration
order.

Read off GPTModel.named_parameters() in all eight minors from 0.12 to 0.19, which agree but for one name
(mtp_model_layer is transformer_layer before 0.17), and with Transformer Engine's layers on an H200.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from bundle.architectures import MLA, Architecture, padded_vocabulary
from bundle.capabilities import LayerTraits
from bundle.planning.layout import Chunk
from bundle.recipe import Parallel


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of one rank. `shape` is local; `cut` names the axis (tp or etp) and the dimension it was cut
    along.
    """

    name: str
    shape: tuple[int, ...]
    cut: tuple[str, int] | None = None
    expert: bool = False
    shared_embedding: bool = False  # of the first and the last stage, hence in a bucket of its own

    @property
    def elements(self) -> int:
        """The number of values that this rank holds."""
        return math.prod(self.shape)


def parameters(
    architecture: Architecture, parallel: Parallel, chunk: Chunk, traits: LayerTraits
) -> tuple[Parameter, ...]:
    """The parameters of one rank's model chunk, in the order in which megatron-core registers them."""
    writer = _Writer(architecture, parallel, traits)
    return tuple(writer.chunk(chunk))


@dataclass(frozen=True, slots=True)
class _Writer:
    architecture: Architecture
    parallel: Parallel
    traits: LayerTraits

    def chunk(self, chunk: Chunk) -> Iterator[Parameter]:
        architecture, parallel = self.architecture, self.parallel
        hidden = architecture.hidden_size
        rows = padded_vocabulary(architecture.vocab_size, parallel.tp) // parallel.tp
        # The first stage owns the embedding; a later one holds a copy for MTP, or as a tied head.
        travels = parallel.pp > 1 and (architecture.tied_embeddings or architecture.mtp_layers > 0)
        table = Parameter("", (rows, hidden), ("tp", 0))
        if chunk.embedding or chunk.embedding_copy:
            yield replace(table, name="embedding.word_embeddings.weight", shared_embedding=travels)
        for place, number in enumerate(chunk.layers):
            yield from self.layer(f"decoder.layers.{place}", bool(architecture.layer_pattern[number]))
        if chunk.head:
            yield Parameter("decoder.final_layernorm.weight", (hidden,))
        for depth in range(chunk.mtp_layers):
            yield from self.mtp_layer(f"mtp.layers.{depth}")
        if chunk.head and not (chunk.embedding and architecture.tied_embeddings):
            alone = architecture.tied_embeddings and not chunk.embedding_copy
            yield replace(table, name="output_layer.weight", shared_embedding=travels and alone)

    def mtp_layer(self, at: str) -> Iterator[Parameter]:
        hidden = self.architecture.hidden_size
        yield Parameter(f"{at}.enorm.weight", (hidden,))
        yield Parameter(f"{at}.hnorm.weight", (hidden,))
        yield self.matrix(f"{at}.eh_proj", hidden, 2 * hidden, rows=True)
        yield from self.layer(f"{at}.mtp_model_layer", bool(self.architecture.layer_pattern[-1]))
        yield Parameter(f"{at}.final_layernorm.weight", (hidden,))

    def layer(self, at: str, experts: bool) -> Iterator[Parameter]:
        hidden, fused = self.architecture.hidden_size, self.traits.fused_norms
        latent = self.architecture.mla
        # Latent attention starts with projections that are not fused with a norm.
        if latent or not fused:
            yield Parameter(f"{at}.input_layernorm.weight", (hidden,))
        yield from (
            self.latent_attention(f"{at}.self_attention", latent)
            if latent
            else self.attention(f"{at}.self_attention")
        )
        if experts or not fused:
            yield Parameter(f"{at}.pre_mlp_layernorm.weight", (hidden,))
        if experts:
            yield from self.experts(f"{at}.mlp")
        else:
            yield from self.mlp(f"{at}.mlp", self.architecture.ffn_hidden_size, norm=fused)

    def attention(self, at: str) -> Iterator[Parameter]:
        a = self.architecture
        width = a.kv_channels
        yield self.matrix(f"{at}.linear_proj", a.hidden_size, a.num_attention_heads * width, rows=False)
        rows = (a.num_attention_heads + 2 * a.num_query_groups) * width
        yield from self.normed(f"{at}.linear_qkv", rows, a.hidden_size, norm=self.traits.fused_norms)
        if a.qkv_bias:
            yield Parameter(f"{at}.linear_qkv.bias", (rows // self.parallel.tp,), ("tp", 0))
        if a.qk_layernorm:
            yield Parameter(f"{at}.q_layernorm.weight", (width,))
            yield Parameter(f"{at}.k_layernorm.weight", (width,))

    def latent_attention(self, at: str, mla: MLA) -> Iterator[Parameter]:
        a, fused = self.architecture, self.traits.fused_norms
        heads, hidden = a.num_attention_heads, a.hidden_size
        yield self.matrix(f"{at}.linear_proj", hidden, heads * mla.v_head_dim, rows=False)
        queries = heads * mla.q_head_dim
        if mla.q_lora_rank is None:
            yield self.matrix(f"{at}.linear_q_proj", queries, hidden, rows=True)
        else:
            yield Parameter(f"{at}.linear_q_down_proj.weight", (mla.q_lora_rank, hidden))
            yield from self.normed(f"{at}.linear_q_up_proj", queries, mla.q_lora_rank, norm=fused)
        compressed = mla.kv_lora_rank + mla.qk_pos_emb_head_dim
        yield Parameter(f"{at}.linear_kv_down_proj.weight", (compressed, hidden))
        both = heads * (mla.qk_head_dim + mla.v_head_dim)
        yield from self.normed(f"{at}.linear_kv_up_proj", both, mla.kv_lora_rank, norm=fused)
        if not fused:
            if mla.q_lora_rank is not None:
                yield Parameter(f"{at}.q_layernorm.weight", (mla.q_lora_rank,))
            yield Parameter(f"{at}.kv_layernorm.weight", (mla.kv_lora_rank,))

    def mlp(self, at: str, width: int, norm: bool) -> Iterator[Parameter]:
        hidden = self.architecture.hidden_size
        yield from self.normed(f"{at}.linear_fc1", 2 * width, hidden, norm=norm)  # gate and up
        yield self.matrix(f"{at}.linear_fc2", hidden, width, rows=False)

    def experts(self, at: str) -> Iterator[Parameter]:
        moe = self.architecture.moe
        assert moe is not None
        hidden, etp = self.architecture.hidden_size, self.parallel.etp
        yield Parameter(f"{at}.router.weight", (moe.num_experts, hidden))
        first = Parameter("", (2 * moe.ffn_hidden_size // etp, hidden), ("etp", 0), expert=True)
        second = Parameter("", (hidden, moe.ffn_hidden_size // etp), ("etp", 1), expert=True)
        local = range(moe.num_experts // self.parallel.ep)
        if self.traits.grouped_experts:
            yield from (replace(first, name=f"{at}.experts.linear_fc1.weight{i}") for i in local)
            yield from (replace(second, name=f"{at}.experts.linear_fc2.weight{i}") for i in local)
        else:
            for i in local:
                yield replace(first, name=f"{at}.experts.local_experts.{i}.linear_fc1.weight")
                yield replace(second, name=f"{at}.experts.local_experts.{i}.linear_fc2.weight")
        if moe.shared_ffn_hidden_size:
            yield from self.mlp(f"{at}.shared_experts", moe.shared_ffn_hidden_size, norm=False)

    def matrix(self, name: str, rows_of: int, columns: int, *, rows: bool) -> Parameter:
        """A projection's weight, cut between tp ranks along its rows or its columns."""
        tp = self.parallel.tp
        shape = (rows_of // tp, columns) if rows else (rows_of, columns // tp)
        return Parameter(f"{name}.weight", shape, ("tp", 0 if rows else 1))

    def normed(self, name: str, rows_of: int, columns: int, *, norm: bool) -> Iterator[Parameter]:
        """A projection cut along its rows, after the norm that may be part of it."""
        if norm:
            yield Parameter(f"{name}.layer_norm_weight", (columns,))
        yield self.matrix(name, rows_of, columns, rows=True)
