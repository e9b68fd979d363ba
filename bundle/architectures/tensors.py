"""The table of a model's tensors, from which the plan's bytes, a rank's part, import and export are read.

Names and order are those that megatron-core's own layer specs give them, which all eight minors from 0.12 to
0.19 agree on but for one name (transformer_layer is mtp_model_layer from 0.17). Here layers count over all
stages and experts over all ranks, and shapes are whole.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from typing import Literal, NamedTuple

from bundle.architectures import multimodal
from bundle.architectures.architecture import MLA, Architecture, DeltaNet, padded_vocabulary
from bundle.architectures.published import NAMES, Names, kind_of

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
SINKS = "softmax_offset"  # what megatron-core and Transformer Engine call a layer's learned sinks
TOWER = "vision.tower."  # what the names of a vision tower's tensors begin with; every tp rank holds it whole
_PROJECTOR = (f"{TOWER}merger.", f"{TOWER}deepstack_merger_list.")

# What tensor-parallel ranks hold parts of, by module: the dimension that is cut, and the sizes, as shares, of
# the blocks of it that are cut one by one (gate and up). Experts are cut alike, by expert tensor parallelism.
_ONE = (1,)
_CUTS = {
    "word_embeddings": (0, _ONE),
    "output_layer": (0, _ONE),
    "linear_qkv": (0, _ONE),
    "linear_q_proj": (0, _ONE),
    "linear_q_up_proj": (0, _ONE),
    "linear_kv_up_proj": (0, _ONE),
    "eh_proj": (0, _ONE),
    "linear_fc1": (0, (1, 1)),
    "linear_proj": (1, _ONE),
    "linear_fc2": (1, _ONE),
    "out_proj": (1, _ONE),
}
# Of what a rank has the entries of its own heads.
_BY_HEAD = (SINKS, "A_log", "dt_bias")


class Cut(NamedTuple):
    """The axis whose ranks hold one part each of a tensor, cut along `dim` in each of several blocks.

    `blocks` are their sizes, as shares of the whole.
    """

    axis: Literal["tp", "etp"]
    dim: int
    blocks: tuple[int, ...]


def cut(name: str, net: DeltaNet | None = None) -> Cut | None:
    """How the tensor of that name is cut; None: every rank holds all of it. `net`: of its model."""
    *_, module, kind = name.split(".")
    if kind in _BY_HEAD:
        return Cut("tp", 0, _ONE)
    if name.startswith(TOWER) or kind not in ("weight", "bias"):
        return None
    if net is not None and module in ("in_proj", "conv1d"):
        return Cut("tp", 0, net.widths if module == "in_proj" else net.convolved)
    if module not in _CUTS:
        return None
    dim, blocks = _CUTS[module]
    if kind == "bias" and dim == 1:
        return None
    return Cut("etp" if is_expert(name) else "tp", dim, blocks)


def is_expert(name: str) -> bool:
    """Whether this is a routed expert's, of which each ep rank has its own."""
    return ".experts." in name


def is_projector(name: str) -> bool:
    """Whether this is of those modules of a tower that make embeddings as wide as the decoder's."""
    return name.startswith(_PROJECTOR)


def is_buffer(name: str) -> bool:
    """Whether this is kept with the weights, and no gradient changes it."""
    return name.endswith(".expert_bias")


class Piece(NamedTuple):
    """Every `step`th of the entries [start, stop) of published tensor number `source`, along the dimension of
    joining.
    """

    source: int
    start: int
    stop: int
    step: int = 1

    @property
    def length(self) -> int:
        """How many entries that are."""
        return len(range(self.start, self.stop, self.step))


class Rule(NamedTuple):
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

    def pieces(self) -> Iterator[Piece]:
        """What ours consists of, from its first entry on; behind the last piece there is padding."""
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
                at = i * self.widths[source]
                yield Piece(source, at + start, at + stop, step)


class Stack(NamedTuple):
    """An entry, of so many, along a first dimension that a published tensor has and ours have not.

    A matrix lies there turned: its columns are our rows.
    """

    entry: int
    entries: int


class Tensor(NamedTuple):
    """One tensor of the whole model. `published` is what it is made of; () where no family publishes it.

    `copies` are the names under which the only one that it is made of is written once more.
    """

    name: str
    shape: tuple[int, ...]
    published: tuple[str, ...] = ()
    rule: Rule = Rule("copy", ())
    stack: Stack | None = None
    copies: tuple[str, ...] = ()

    @property
    def written(self) -> tuple[str, ...]:
        """The names of everything that is written of it."""
        return (*self.published, *self.copies)

    @property
    def elements(self) -> int:
        """The number of its values."""
        return math.prod(self.shape)

    def published_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of everything that is written of it."""
        rule = self.rule
        widths = (*rule.widths, *(rule.widths[0] for _ in self.copies))
        for name, width in zip(self.written, widths, strict=True):
            size = width * rule.repeats
            shape = (*self.shape[: rule.dim], size, *self.shape[rule.dim + 1 :])
            yield name, (self.stack.entries, *reversed(shape)) if self.stack else shape


class Tensors:
    """The tensors of a model, all or part by part; `tp` matters to the padding of the vocabulary alone.

    `written_copies` are those of `copies` that are written beside their originals.
    """

    def __init__(self, architecture: Architecture, tp: int = 1, written_copies: Collection[str] = ()) -> None:
        self.architecture = architecture
        self._written_copies = written_copies
        self.names = NAMES[architecture.model_type]
        self._rows = padded_vocabulary(architecture.vocab_size, tp)

    def __iter__(self) -> Iterator[Tensor]:
        """All of them; a tied head is the embedding and comes once."""
        yield self.embedding()
        for number in range(self.architecture.num_layers):
            yield from self.layer(number)
        yield self.final_norm()
        for depth in range(self.architecture.mtp_layers):
            yield from self.mtp_layer(depth)
        if not self.architecture.tied_embeddings:
            yield self.head()
        yield from self.tower()

    def published(self) -> Iterator[Tensor]:
        """Those that are published, in an order to write them in: the entries of a stack stand together."""
        of_names: dict[tuple[str, ...], list[Tensor]] = {}
        for tensor in self:
            if tensor.published:
                of_names.setdefault(tensor.published, []).append(tensor)
        for tensors in of_names.values():
            yield from tensors

    def embedding(self) -> Tensor:
        """The word embedding, with its rows of padding."""
        return self._of_vocabulary(EMBEDDING)

    def head(self) -> Tensor:
        """The output layer of a model that does not use the embedding for it."""
        return self._of_vocabulary(HEAD)

    def final_norm(self) -> Tensor:
        """The norm behind the last decoder layer."""
        width = self.architecture.hidden_size
        name = "decoder.final_layernorm"
        return Tensor(
            f"{name}.weight", (width,), (f"{self.names.of_model(name)}.weight",), Rule("copy", (width,))
        )

    def layer(self, number: int, experts: Iterable[int] | None = None) -> Iterator[Tensor]:
        """The tensors of decoder layer `number`, from 0; of all experts, or of those with these numbers."""
        published = f"{self.names.decoder}layers.{number}."
        place = _Place(self.names, f"decoder.layers.{number}.", published)
        routed, net = bool(self.architecture.layer_pattern[number]), self.architecture.delta_net
        linear = net if net and net.layers[number] else None
        yield from _layer(self.architecture, place, routed=routed, experts=experts, net=linear)

    def tower(self) -> Iterator[Tensor]:
        """The tensors of the vision tower, if there is one, the projector's among them."""
        if self.architecture.vision is None:
            return
        for name, shape in multimodal.tower(self.architecture.vision, self.architecture.hidden_size):
            published = f"{self.names.vision}{name}"
            yield Tensor(f"{TOWER}{name}", shape, (published,), Rule("copy", shape[:1]))

    def mtp_layer(self, depth: int, experts: Iterable[int] | None = None) -> Iterator[Tensor]:
        """The tensors of an MTP layer: the last decoder layer's kind, and what stands around it."""
        a, names, hidden = self.architecture, self.names.mtp, self.architecture.hidden_size
        at, published = f"mtp.layers.{depth}.", self._mtp_at(depth)

        def around(module: str, shape: tuple[int, ...], rule: Rule | None = None) -> Tensor:
            name = f"{at}{module}.weight"
            if names is None:
                return Tensor(name, shape)
            of = (f"{published}{names.around[module]}.weight",)
            return Tensor(name, shape, of, rule or Rule("copy", shape[:1]))

        turned = Rule("halves", (2 * hidden,), dim=1) if names and names.hidden_first else None
        yield around("enorm", (hidden,))
        yield around("hnorm", (hidden,))
        yield around("eh_proj", (hidden, 2 * hidden), turned)
        place = _Place(self.names, f"{at}transformer_layer.", published)
        yield from _layer(a, place, routed=bool(a.layer_pattern[-1]), experts=experts)
        yield around("final_layernorm", (hidden,))

    def copies(self) -> dict[str, str]:
        """Tensors that a directory may hold once more: the copy's published name -> the original's."""
        a = self.architecture
        embedding, head = (self._build_published_name(name) for name in (EMBEDDING, HEAD))
        found = {head: embedding} if a.tied_embeddings else {}
        originals = {EMBEDDING: embedding, HEAD: found.get(head, head)}
        for depth in range(a.mtp_layers if self.names.mtp else 0):
            assert self.names.mtp is not None
            for module, original in self.names.mtp.copies.items():
                found[f"{self._mtp_at(depth)}{module}.weight"] = originals[f"{original}.weight"]
        return found

    def find_copies(self, source: Collection[str]) -> list[str]:
        """Return the copies to write of a model that began with tensors of the names `source`.

        They are those of the source; MTP layers that the source lacks have those of their family.
        """
        layers = [self._mtp_at(depth) for depth in range(self.architecture.mtp_layers)]
        new = tuple(at for at in layers if at and not any(name.startswith(at) for name in source))
        return [copy for copy in self.copies() if copy in source or copy.startswith(new)]

    def _mtp_at(self, depth: int) -> str | None:
        layer = self.architecture.num_layers + depth
        return self.names.mtp.at.format(depth=depth, layer=layer) if self.names.mtp else None

    def _of_vocabulary(self, name: str) -> Tensor:
        a, published = self.architecture, self._build_published_name(name)
        rule = Rule("vocabulary", (a.vocab_size,))
        originals = self.copies() if self._written_copies else {}
        copies = tuple(copy for copy in self._written_copies if originals.get(copy) == published)
        return Tensor(name, (self._rows, a.hidden_size), (published,), rule, copies=copies)

    def _build_published_name(self, name: str) -> str:
        return f"{self.names.of_model(name.removesuffix('.weight'))}.weight"


class _Place(NamedTuple):
    """Where a decoder layer's tensors stand; `published` is None where nobody publishes this layer."""

    names: Names
    at: str
    published: str | None

    def tensor(
        self,
        module: str,
        shape: tuple[int, ...],
        rule: Rule | None = None,
        kind: str = "weight",
        stack: Stack | None = None,
    ) -> Tensor:
        rule = rule or Rule("copy", (shape[0],))
        name = f"{self.at}{module}.{kind}"
        if self.published is None:
            return Tensor(name, shape)
        kind = kind_of(kind, stacked=stack is not None)
        published = (f"{self.published}{theirs}{kind}" for theirs in self.names.of_layer(module))
        return Tensor(name, shape, tuple(published), rule, stack)


def _layer(
    a: Architecture,
    to: _Place,
    *,
    routed: bool,
    experts: Iterable[int] | None,
    net: DeltaNet | None = None,
) -> Iterator[Tensor]:
    hidden = a.hidden_size
    yield to.tensor("input_layernorm", (hidden,))
    if net is not None:
        yield from _delta_net(a, to, net)
    else:
        yield from _latent_attention(a, to, a.mla) if a.mla else _attention(a, to)
    yield to.tensor("pre_mlp_layernorm", (hidden,))
    if routed:
        yield from _experts(a, to, experts)
    else:
        yield from _gated(to, "mlp", hidden, a.ffn_hidden_size, bias=a.linear_bias)


def _attention(a: Architecture, to: _Place) -> Iterator[Tensor]:
    width, groups, at = a.kv_channels, a.num_query_groups, "self_attention"
    heads = a.num_attention_heads // groups
    by_group = Rule("qkv", (heads * width, width, width), repeats=groups)
    if a.output_gate:
        by_group = _gated_queries(heads, width)._replace(repeats=groups)
    rows = sum(by_group.widths) * groups
    if a.sinks:
        yield to.tensor(f"{at}.core_attention", (a.num_attention_heads,), kind=SINKS)
    yield to.tensor(f"{at}.linear_proj", (a.hidden_size, a.num_attention_heads * width))
    if a.linear_bias:
        yield to.tensor(f"{at}.linear_proj", (a.hidden_size,), kind="bias")
    yield to.tensor(f"{at}.linear_qkv", (rows, a.hidden_size), by_group)
    if a.qkv_bias:
        yield to.tensor(f"{at}.linear_qkv", (rows,), by_group, "bias")
    if a.qk_layernorm:
        yield to.tensor(f"{at}.q_layernorm", (width,))
        yield to.tensor(f"{at}.k_layernorm", (width,))


def _gated_queries(heads: int, width: int) -> Rule:
    """A head's gate is published behind its query; ours are all queries of a group, then all gates."""
    queries, gates = (
        [Piece(0, at + first, at + first + width) for at in range(0, 2 * heads * width, 2 * width)]
        for first in (0, width)
    )
    return Rule(
        "heads",
        (2 * heads * width, width, width),
        order=(*queries, *gates, Piece(1, 0, width), Piece(2, 0, width)),
    )


def _delta_net(a: Architecture, to: _Place, net: DeltaNet) -> Iterator[Tensor]:
    at, heads = "self_attention", net.num_value_heads
    apart = Rule("gated", (sum(net.convolved), *net.widths[3:]))
    rule = _by_key_heads(net) if to.names.by_key_heads else apart
    yield to.tensor(at, (heads,), kind="dt_bias")
    yield to.tensor(at, (heads,), kind="A_log")
    yield to.tensor(f"{at}.in_proj", (sum(net.widths), a.hidden_size), rule)
    yield to.tensor(f"{at}.conv1d", (sum(net.convolved), 1, net.convolution))
    yield to.tensor(f"{at}.out_norm", (net.value_head_dim,))
    yield to.tensor(f"{at}.out_proj", (a.hidden_size, heads * net.value_head_dim))


def _by_key_heads(net: DeltaNet) -> Rule:
    """Published are, for each head of keys, its query, key, values and gates, and its betas and alphas."""
    of_head = [width // net.num_key_heads for width in net.widths]
    sources = (0, 0, 0, 0, 1, 1)
    widths = tuple(
        sum(width for width, of in zip(of_head, sources, strict=True) if of == source) for source in (0, 1)
    )
    order = []
    for number, (source, width) in enumerate(zip(sources, of_head, strict=True)):
        first = sum(of_head[:number]) - (widths[0] if source else 0)
        for head in range(net.num_key_heads):
            start = head * widths[source] + first
            order.append(Piece(source, start, start + width))
    return Rule("heads", tuple(width * net.num_key_heads for width in widths), order=tuple(order))


def _latent_attention(a: Architecture, to: _Place, mla: MLA) -> Iterator[Tensor]:
    heads, hidden, at = a.num_attention_heads, a.hidden_size, "self_attention"
    yield to.tensor(f"{at}.linear_proj", (hidden, heads * mla.v_head_dim))
    queries = heads * mla.q_head_dim
    if mla.q_lora_rank is None:
        yield to.tensor(f"{at}.linear_q_proj", (queries, hidden))
    else:
        yield to.tensor(f"{at}.linear_q_down_proj", (mla.q_lora_rank, hidden))
        yield to.tensor(f"{at}.linear_q_up_proj", (queries, mla.q_lora_rank))
    yield to.tensor(f"{at}.linear_kv_down_proj", (mla.kv_lora_rank + mla.qk_pos_emb_head_dim, hidden))
    yield to.tensor(f"{at}.linear_kv_up_proj", (heads * (mla.qk_head_dim + mla.v_head_dim), mla.kv_lora_rank))
    if mla.q_lora_rank is not None:
        yield to.tensor(f"{at}.q_layernorm", (mla.q_lora_rank,))
    yield to.tensor(f"{at}.kv_layernorm", (mla.kv_lora_rank,))


def _gated(
    to: _Place, at: str, hidden: int, width: int, *, bias: bool = False, stack: Stack | None = None
) -> Iterator[Tensor]:
    how = to.names.stacked_experts if stack else None
    both = Rule(how, (2 * width,)) if how else Rule("gated", (width, width))
    yield to.tensor(f"{at}.linear_fc1", (2 * width, hidden), both, stack=stack)
    if bias:
        yield to.tensor(f"{at}.linear_fc1", (2 * width,), both, "bias", stack)
    yield to.tensor(f"{at}.linear_fc2", (hidden, width), stack=stack)
    if bias:
        yield to.tensor(f"{at}.linear_fc2", (hidden,), kind="bias", stack=stack)


def _experts(a: Architecture, to: _Place, numbers: Iterable[int] | None) -> Iterator[Tensor]:
    moe, hidden = a.moe, a.hidden_size
    assert moe is not None
    yield to.tensor("mlp.router", (moe.num_experts, hidden))
    if moe.expert_bias:
        yield to.tensor("mlp.router", (moe.num_experts,), kind="expert_bias")
    if a.linear_bias:
        yield to.tensor("mlp.router", (moe.num_experts,), kind="bias")
    for number in range(moe.num_experts) if numbers is None else numbers:
        stack = Stack(number, moe.num_experts) if to.names.stacked_experts else None
        at = f"mlp.experts.local_experts.{number}"
        yield from _gated(to, at, hidden, moe.ffn_hidden_size, bias=a.linear_bias, stack=stack)
    if moe.shared_gate:
        yield to.tensor("mlp.shared_experts", (1, hidden), kind="gate_weight")
    if moe.shared_ffn_hidden_size:
        yield from _gated(to, "mlp.shared_experts", hidden, moe.shared_ffn_hidden_size)
