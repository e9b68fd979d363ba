"""List a model's tensors in a table; the plan's bytes, a rank's part, import and export are read from it.

Names and order are those of megatron-core's own layer specs. All eight minors from 0.12 to 0.19 agree on them
but for one name (transformer_layer is mtp_model_layer from 0.17). Here layers count over all stages and
experts over all ranks, and shapes are whole.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from typing import Literal, NamedTuple

from bundle.architectures import multimodal
from bundle.architectures.architecture import MLA, Architecture, DeltaNet, pad_vocab_to_lcm
from bundle.architectures.published_names import PUBLISHED_NAMES, PublishedNames, build_suffix

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
SINKS_NAME = "softmax_offset"  # what megatron-core and Transformer Engine call a layer's learned sinks
TOWER_PREFIX = (
    "vision.tower."  # what the names of a vision tower's tensors begin with; every tp rank holds it whole
)
_PROJECTOR_PREFIXES = (f"{TOWER_PREFIX}merger.", f"{TOWER_PREFIX}deepstack_merger_list.")

# How tensor-parallel ranks cut modules: the dimension, and the shares of its blocks that are cut one by one
# (gate and up). Experts are cut alike, by expert tensor parallelism.
_SINGLE_CUT_BLOCK = (1,)
_TP_DIM_AND_BLOCKS = {
    "word_embeddings": (0, _SINGLE_CUT_BLOCK),
    "output_layer": (0, _SINGLE_CUT_BLOCK),
    "linear_qkv": (0, _SINGLE_CUT_BLOCK),
    "linear_q_proj": (0, _SINGLE_CUT_BLOCK),
    "linear_q_up_proj": (0, _SINGLE_CUT_BLOCK),
    "linear_kv_up_proj": (0, _SINGLE_CUT_BLOCK),
    "eh_proj": (0, _SINGLE_CUT_BLOCK),
    "linear_fc1": (0, (1, 1)),
    "linear_proj": (1, _SINGLE_CUT_BLOCK),
    "linear_fc2": (1, _SINGLE_CUT_BLOCK),
    "out_proj": (1, _SINGLE_CUT_BLOCK),
}
# Tensors with an entry for each head; a rank has the entries of its own heads.
_PER_ATTENTION_HEAD_PARAMETERS = (SINKS_NAME, "A_log", "dt_bias")


class Cut(NamedTuple):
    """The axis whose ranks hold one part each of a tensor, and `dim`, the dimension that is cut.

    The dimension has several blocks, which are cut one by one. `blocks` are their sizes as shares of the
    whole.
    """

    axis: Literal["tp", "etp"]
    dim: int
    blocks: tuple[int, ...]


def find_cut(name: str, net: DeltaNet | None = None) -> Cut | None:
    """Return how the tensor of that name is cut; None: every rank holds all of it. `net` is the model's."""
    *_, module, kind = name.split(".")
    if kind in _PER_ATTENTION_HEAD_PARAMETERS:
        return Cut("tp", 0, _SINGLE_CUT_BLOCK)
    if name.startswith(TOWER_PREFIX) or kind not in ("weight", "bias"):
        return None
    if net is not None and module in ("in_proj", "conv1d"):
        return Cut("tp", 0, net.projection_widths if module == "in_proj" else net.convolution_widths)
    if module not in _TP_DIM_AND_BLOCKS:
        return None
    dim, blocks = _TP_DIM_AND_BLOCKS[module]
    if kind == "bias" and dim == 1:
        return None
    return Cut("etp" if is_expert(name) else "tp", dim, blocks)


def is_expert(name: str) -> bool:
    """Return whether a tensor belongs to a routed expert; each ep rank has experts of its own."""
    return ".experts." in name


def is_projector(name: str) -> bool:
    """Return whether a tensor belongs to a tower's modules that make embeddings of the decoder's width."""
    return name.startswith(_PROJECTOR_PREFIXES)


def is_buffer(name: str) -> bool:
    """Return whether a tensor is stored with the weights although no gradient changes it."""
    return name.endswith(".expert_bias")


class Piece(NamedTuple):
    """Every `step`th of the entries [start, stop) of published tensor number `source`.

    The entries lie along the dimension in which tensors are joined.
    """

    source: int
    start: int
    stop: int
    step: int = 1

    @property
    def length(self) -> int:
        """The number of these entries."""
        return len(range(self.start, self.stop, self.step))


class ConversionRule(NamedTuple):
    """How published tensors make one of ours, and the way back.

    - copy: it is ours; vocabulary: it is the first rows of ours, and the rest is padding
    - gated: all of the first, then all of the second
    - turns: the first of every two entries, then the second
    - qkv: group by group the group's part of each
    - halves: the second half of its columns, then the first
    - heads: the pieces of `order` for each head of keys, or for each group of queries

    `widths` are the entries along `dim` of one piece of each source, `repeats` how often one of each comes.
    """

    kind: Literal["copy", "vocabulary", "gated", "turns", "qkv", "halves", "heads"]
    widths: tuple[int, ...]
    repeats: int = 1
    dim: int = 0
    order: tuple[Piece, ...] = ()

    def iterate_pieces(self) -> Iterator[Piece]:
        """Yield the pieces of our tensor from its first entry on; the rest behind the last is padding."""
        if self.kind == "halves":
            (width,) = self.widths
            yield Piece(0, width // 2, width)
            yield Piece(0, 0, width // 2)
            return
        if self.kind == "turns":
            (width,) = self.widths
            yield Piece(0, 0, width, 2)
            yield Piece(0, 1, width, 2)
            return
        order = self.order or tuple(Piece(source, 0, width) for source, width in enumerate(self.widths))
        for i in range(self.repeats):
            for source, start, stop, step in order:
                offset = i * self.widths[source]
                yield Piece(source, offset + start, offset + stop, step)


class StackEntry(NamedTuple):
    """One entry of a published tensor with a first dimension of `entries`, which our tensors do not have.

    A matrix is transposed there: its columns are our rows.
    """

    entry: int
    entries: int


class Tensor(NamedTuple):
    """One tensor of the whole model; `published_names` are the published tensors that it is made of.

    They are () where no family publishes it. `copy_names` are further names under which a tensor made of one
    published tensor is written once more.
    """

    name: str
    shape: tuple[int, ...]
    published_names: tuple[str, ...] = ()
    rule: ConversionRule = ConversionRule("copy", ())
    stack: StackEntry | None = None
    copy_names: tuple[str, ...] = ()

    @property
    def published_and_copy_names(self) -> tuple[str, ...]:
        """The names of everything that is written of the tensor."""
        return (*self.published_names, *self.copy_names)

    @property
    def elements(self) -> int:
        """The number of values of the tensor."""
        return math.prod(self.shape)

    def list_published_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield (name, shape) of everything that is written of the tensor."""
        rule = self.rule
        widths = (*rule.widths, *(rule.widths[0] for _ in self.copy_names))
        for name, width in zip(self.published_and_copy_names, widths, strict=True):
            size = width * rule.repeats
            shape = (*self.shape[: rule.dim], size, *self.shape[rule.dim + 1 :])
            yield name, (self.stack.entries, *reversed(shape)) if self.stack else shape


class Tensors:
    """The tensors of a model, all or part by part; `tp` matters only for the padding of the vocabulary.

    `written_copies` are the `map_copies` that are written beside their originals.
    """

    def __init__(self, architecture: Architecture, tp: int = 1, written_copies: Collection[str] = ()) -> None:
        self.architecture = architecture
        self._written_copies = written_copies
        self.names = PUBLISHED_NAMES[architecture.model_type]
        self._vocab_rows = pad_vocab_to_lcm(architecture.vocab_size, tp)

    def __iter__(self) -> Iterator[Tensor]:
        """Yield all tensors; a tied head is the embedding and comes once."""
        yield self.build_embedding()
        for number in range(self.architecture.num_layers):
            yield from self.build_layer(number)
        yield self.build_final_norm()
        for depth in range(self.architecture.mtp_layers):
            yield from self.build_mtp_layer(depth)
        if not self.architecture.tied_embeddings:
            yield self.build_head()
        yield from self.build_tower()

    def iterate_in_publishing_order(self) -> Iterator[Tensor]:
        """Yield the published tensors in the order of writing: the entries of a stack stand together."""
        by_names: dict[tuple[str, ...], list[Tensor]] = {}
        for tensor in self:
            if tensor.published_names:
                by_names.setdefault(tensor.published_names, []).append(tensor)
        for tensors in by_names.values():
            yield from tensors

    def build_embedding(self) -> Tensor:
        """Return the word embedding with its rows of padding."""
        return self._build_vocabulary_tensor(EMBEDDING)

    def build_head(self) -> Tensor:
        """Return the output layer of a model that does not use the embedding for it."""
        return self._build_vocabulary_tensor(HEAD)

    def build_final_norm(self) -> Tensor:
        """Return the norm behind the last decoder layer."""
        width = self.architecture.hidden_size
        name = "decoder.final_layernorm"
        return Tensor(
            f"{name}.weight",
            (width,),
            (f"{self.names.find_non_layer_module(name)}.weight",),
            ConversionRule("copy", (width,)),
        )

    def build_layer(self, number: int, experts: Iterable[int] | None = None) -> Iterator[Tensor]:
        """Yield the tensors of decoder layer `number`, from 0, with all experts or those of these numbers."""
        published_prefix = f"{self.names.decoder_prefix}layers.{number}."
        builder = _LayerBuilder(self.names, f"decoder.layers.{number}.", published_prefix)
        routed, net = bool(self.architecture.moe_layer_pattern[number]), self.architecture.delta_net
        linear = net if net and net.layers[number] else None
        yield from _build_layer(self.architecture, builder, has_experts=routed, experts=experts, net=linear)

    def build_tower(self) -> Iterator[Tensor]:
        """Yield the tensors of the vision tower, if there is one, with those of the projector."""
        if self.architecture.vision is None:
            return
        for name, shape in multimodal.list_tower_tensors(
            self.architecture.vision, self.architecture.hidden_size
        ):
            published = f"{self.names.vision_prefix}{name}"
            yield Tensor(f"{TOWER_PREFIX}{name}", shape, (published,), ConversionRule("copy", shape[:1]))

    def build_mtp_layer(self, depth: int, experts: Iterable[int] | None = None) -> Iterator[Tensor]:
        """Yield the tensors of an MTP layer.

        They are those of a layer of the last decoder layer's kind, and those of the modules around it.
        """
        a, names, hidden = self.architecture, self.names.mtp, self.architecture.hidden_size
        prefix, published_prefix = f"mtp.layers.{depth}.", self._build_mtp_prefix(depth)

        def build_outer_tensor(
            module: str, shape: tuple[int, ...], rule: ConversionRule | None = None
        ) -> Tensor:
            name = f"{prefix}{module}.weight"
            if names is None:
                return Tensor(name, shape)
            published_names = (f"{published_prefix}{names.outer_modules[module]}.weight",)
            return Tensor(name, shape, published_names, rule or ConversionRule("copy", shape[:1]))

        projection_rule = (
            ConversionRule("halves", (2 * hidden,), dim=1) if names and names.is_hidden_first else None
        )
        yield build_outer_tensor("enorm", (hidden,))
        yield build_outer_tensor("hnorm", (hidden,))
        yield build_outer_tensor("eh_proj", (hidden, 2 * hidden), projection_rule)
        builder = _LayerBuilder(self.names, f"{prefix}transformer_layer.", published_prefix)
        yield from _build_layer(a, builder, has_experts=bool(a.moe_layer_pattern[-1]), experts=experts)
        yield build_outer_tensor("final_layernorm", (hidden,))

    def map_copies(self) -> dict[str, str]:
        """Return the tensors that a directory may hold twice: the copy's published name -> the original's."""
        a = self.architecture
        embedding, head = (self._build_published_name(name) for name in (EMBEDDING, HEAD))
        copy_originals = {head: embedding} if a.tied_embeddings else {}
        originals = {EMBEDDING: embedding, HEAD: copy_originals.get(head, head)}
        for depth in range(a.mtp_layers if self.names.mtp else 0):
            assert self.names.mtp is not None
            for module, original in self.names.mtp.copies.items():
                copy_originals[f"{self._build_mtp_prefix(depth)}{module}.weight"] = originals[
                    f"{original}.weight"
                ]
        return copy_originals

    def list_copies_matching_source(self, source_names: Collection[str]) -> list[str]:
        """Return the copies to write of a model that began with tensors of the names `source_names`.

        They are the copies of the source; MTP layers that the source lacks have those of their family.
        """
        prefixes = [self._build_mtp_prefix(depth) for depth in range(self.architecture.mtp_layers)]
        new_prefixes = tuple(
            prefix
            for prefix in prefixes
            if prefix and not any(name.startswith(prefix) for name in source_names)
        )
        return [copy for copy in self.map_copies() if copy in source_names or copy.startswith(new_prefixes)]

    def _build_mtp_prefix(self, depth: int) -> str | None:
        layer = self.architecture.num_layers + depth
        return self.names.mtp.prefix.format(depth=depth, layer=layer) if self.names.mtp else None

    def _build_vocabulary_tensor(self, name: str) -> Tensor:
        a, published = self.architecture, self._build_published_name(name)
        rule = ConversionRule("vocabulary", (a.vocab_size,))
        originals = self.map_copies() if self._written_copies else {}
        copies = tuple(copy for copy in self._written_copies if originals.get(copy) == published)
        return Tensor(name, (self._vocab_rows, a.hidden_size), (published,), rule, copy_names=copies)

    def _build_published_name(self, name: str) -> str:
        return f"{self.names.find_non_layer_module(name.removesuffix('.weight'))}.weight"


class _LayerBuilder(NamedTuple):
    """The places of a decoder layer's tensors; `published_prefix` is None where it is not published."""

    names: PublishedNames
    prefix: str
    published_prefix: str | None

    def build_tensor(
        self,
        module: str,
        shape: tuple[int, ...],
        rule: ConversionRule | None = None,
        kind: str = "weight",
        stack: StackEntry | None = None,
    ) -> Tensor:
        rule = rule or ConversionRule("copy", (shape[0],))
        name = f"{self.prefix}{module}.{kind}"
        if self.published_prefix is None:
            return Tensor(name, shape)
        kind = build_suffix(kind, stacked=stack is not None)
        published_names = (
            f"{self.published_prefix}{module_name}{kind}"
            for module_name in self.names.list_layer_module_parts(module)
        )
        return Tensor(name, shape, tuple(published_names), rule, stack)


def _build_layer(
    a: Architecture,
    builder: _LayerBuilder,
    *,
    has_experts: bool,
    experts: Iterable[int] | None,
    net: DeltaNet | None = None,
) -> Iterator[Tensor]:
    hidden = a.hidden_size
    yield builder.build_tensor("input_layernorm", (hidden,))
    if net is not None:
        yield from _build_delta_net(a, builder, net)
    else:
        yield from _build_latent_attention(a, builder, a.mla) if a.mla else _build_attention(a, builder)
    yield builder.build_tensor("pre_mlp_layernorm", (hidden,))
    if has_experts:
        yield from _build_moe_layer_tensors(a, builder, experts)
    else:
        yield from _build_gated_mlp(builder, "mlp", hidden, a.ffn_hidden_size, bias=a.linear_bias)


def _build_attention(a: Architecture, builder: _LayerBuilder) -> Iterator[Tensor]:
    width, groups, prefix = a.kv_channels, a.num_query_groups, "self_attention"
    heads = a.num_attention_heads // groups
    qkv_rule = ConversionRule("qkv", (heads * width, width, width), repeats=groups)
    if a.output_gate:
        qkv_rule = _build_gated_query_rule(heads, width)._replace(repeats=groups)
    rows = sum(qkv_rule.widths) * groups
    if a.sinks:
        yield builder.build_tensor(f"{prefix}.core_attention", (a.num_attention_heads,), kind=SINKS_NAME)
    yield builder.build_tensor(f"{prefix}.linear_proj", (a.hidden_size, a.num_attention_heads * width))
    if a.linear_bias:
        yield builder.build_tensor(f"{prefix}.linear_proj", (a.hidden_size,), kind="bias")
    yield builder.build_tensor(f"{prefix}.linear_qkv", (rows, a.hidden_size), qkv_rule)
    if a.qkv_bias:
        yield builder.build_tensor(f"{prefix}.linear_qkv", (rows,), qkv_rule, "bias")
    if a.qk_layernorm:
        yield builder.build_tensor(f"{prefix}.q_layernorm", (width,))
        yield builder.build_tensor(f"{prefix}.k_layernorm", (width,))


def _build_gated_query_rule(heads: int, width: int) -> ConversionRule:
    """Return the rule for queries with gates.

    Each head's gate is published behind its query; ours are all queries of a group, then all its gates.
    """
    queries, gates = (
        [
            Piece(0, offset + first, offset + first + width)
            for offset in range(0, 2 * heads * width, 2 * width)
        ]
        for first in (0, width)
    )
    return ConversionRule(
        "heads",
        (2 * heads * width, width, width),
        order=(*queries, *gates, Piece(1, 0, width), Piece(2, 0, width)),
    )


def _build_delta_net(a: Architecture, builder: _LayerBuilder, net: DeltaNet) -> Iterator[Tensor]:
    prefix, heads = "self_attention", net.num_value_heads
    separate_rule = ConversionRule("gated", (sum(net.convolution_widths), *net.projection_widths[3:]))
    rule = _build_key_head_rule(net) if builder.names.has_key_head_order else separate_rule
    yield builder.build_tensor(prefix, (heads,), kind="dt_bias")
    yield builder.build_tensor(prefix, (heads,), kind="A_log")
    yield builder.build_tensor(f"{prefix}.in_proj", (sum(net.projection_widths), a.hidden_size), rule)
    yield builder.build_tensor(f"{prefix}.conv1d", (sum(net.convolution_widths), 1, net.convolution))
    yield builder.build_tensor(f"{prefix}.out_norm", (net.value_head_dim,))
    yield builder.build_tensor(f"{prefix}.out_proj", (a.hidden_size, heads * net.value_head_dim))


def _build_key_head_rule(net: DeltaNet) -> ConversionRule:
    """Return the rule for published tensors that are ordered by heads of keys.

    The first has the query, key, values and gates of each head, the second its betas and alphas.
    """
    head_widths = [width // net.num_key_heads for width in net.projection_widths]
    sources = (0, 0, 0, 0, 1, 1)
    widths = tuple(
        sum(width for width, width_source in zip(head_widths, sources, strict=True) if width_source == source)
        for source in (0, 1)
    )
    order = []
    for number, (source, width) in enumerate(zip(sources, head_widths, strict=True)):
        first = sum(head_widths[:number]) - (widths[0] if source else 0)
        for head in range(net.num_key_heads):
            start = head * widths[source] + first
            order.append(Piece(source, start, start + width))
    return ConversionRule("heads", tuple(width * net.num_key_heads for width in widths), order=tuple(order))


def _build_latent_attention(a: Architecture, builder: _LayerBuilder, mla: MLA) -> Iterator[Tensor]:
    heads, hidden, prefix = a.num_attention_heads, a.hidden_size, "self_attention"
    yield builder.build_tensor(f"{prefix}.linear_proj", (hidden, heads * mla.v_head_dim))
    queries = heads * mla.q_head_dim
    if mla.q_lora_rank is None:
        yield builder.build_tensor(f"{prefix}.linear_q_proj", (queries, hidden))
    else:
        yield builder.build_tensor(f"{prefix}.linear_q_down_proj", (mla.q_lora_rank, hidden))
        yield builder.build_tensor(f"{prefix}.linear_q_up_proj", (queries, mla.q_lora_rank))
    yield builder.build_tensor(
        f"{prefix}.linear_kv_down_proj", (mla.kv_lora_rank + mla.qk_pos_emb_head_dim, hidden)
    )
    yield builder.build_tensor(
        f"{prefix}.linear_kv_up_proj", (heads * (mla.qk_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    )
    if mla.q_lora_rank is not None:
        yield builder.build_tensor(f"{prefix}.q_layernorm", (mla.q_lora_rank,))
    yield builder.build_tensor(f"{prefix}.kv_layernorm", (mla.kv_lora_rank,))


def _build_gated_mlp(
    builder: _LayerBuilder,
    prefix: str,
    hidden: int,
    width: int,
    *,
    bias: bool = False,
    stack: StackEntry | None = None,
) -> Iterator[Tensor]:
    stacked_kind = builder.names.stacked_experts if stack else None
    rule = (
        ConversionRule(stacked_kind, (2 * width,))
        if stacked_kind
        else ConversionRule("gated", (width, width))
    )
    yield builder.build_tensor(f"{prefix}.linear_fc1", (2 * width, hidden), rule, stack=stack)
    if bias:
        yield builder.build_tensor(f"{prefix}.linear_fc1", (2 * width,), rule, "bias", stack)
    yield builder.build_tensor(f"{prefix}.linear_fc2", (hidden, width), stack=stack)
    if bias:
        yield builder.build_tensor(f"{prefix}.linear_fc2", (hidden,), kind="bias", stack=stack)


def _build_moe_layer_tensors(
    a: Architecture, builder: _LayerBuilder, numbers: Iterable[int] | None
) -> Iterator[Tensor]:
    moe, hidden = a.moe, a.hidden_size
    assert moe is not None
    yield builder.build_tensor("mlp.router", (moe.num_experts, hidden))
    if moe.expert_bias:
        yield builder.build_tensor("mlp.router", (moe.num_experts,), kind="expert_bias")
    if a.linear_bias:
        yield builder.build_tensor("mlp.router", (moe.num_experts,), kind="bias")
    for number in range(moe.num_experts) if numbers is None else numbers:
        stack = StackEntry(number, moe.num_experts) if builder.names.stacked_experts else None
        prefix = f"mlp.experts.local_experts.{number}"
        yield from _build_gated_mlp(
            builder, prefix, hidden, moe.ffn_hidden_size, bias=a.linear_bias, stack=stack
        )
    if moe.shared_gate:
        yield builder.build_tensor("mlp.shared_experts", (1, hidden), kind="gate_weight")
    if moe.shared_ffn_hidden_size:
        yield from _build_gated_mlp(builder, "mlp.shared_experts", hidden, moe.shared_ffn_hidden_size)
