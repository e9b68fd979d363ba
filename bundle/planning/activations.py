"""Activations: bytes that a rank has saved for backward, over its chunks and the micro-batches in flight.

They are counted tensor by tensor as Korthikanti et al. do ("Reducing Activation Recomputation in Large
Transformer Models", 2022, section 4), for the layers that are really built. `OperationBytes` counts what
one operation saves of a token. `LayerByteCounter` counts one layer without its recomputed modules.
`estimate_activations` counts a stage.
"""

from itertools import chain
from typing import NamedTuple

from bundle.architectures import MLA, DeltaNet, adapters
from bundle.architectures.tensors import Tensors
from bundle.capabilities import LayerTraits
from bundle.environment.packages import MegatronCode, SourcePredicate
from bundle.planning.head import ID_BYTES, HeadBytes
from bundle.planning.layout import ModelChunk, RankLayout
from bundle.planning.size import BF16, FP8, FP32
from bundle.planning.tower_activations import count_activation_bytes_per_patch
from bundle.recipe import Recipe
from bundle.recipe.loss_chunks import (
    choose_loss_chunks,
    compute_local_vocab_size,
    count_microbatch_tokens,
)
from bundle.recipe.recipe import VisionSection

# The gate of experts is computed with glu_linear_offset, zero or not.
SHIFTED_GATE_SOURCE_PREDICATE = SourcePredicate("transformer/mlp.py", "glu_linear_offset", "0.15")
# Earlier releases never recompute MTP layers.
MTP_RECOMPUTATION_SOURCE_PREDICATE = SourcePredicate(
    "transformer/multi_token_prediction.py", "_checkpointed_forward", "0.14"
)
# Products read an input again that another operation saves, and save no FP8 copy of it.
SHARED_FP8_INPUT_SOURCE_PREDICATE = SourcePredicate(
    "transformer/attention.py", "set_save_original_input", "0.14"
)
DELTA_NET_CHUNK = 64  # rows that a gated delta net takes at once


class ActivationBytes(NamedTuple):
    """Bytes of one rank of a stage.

    `microbatch_bytes`: the bytes that one micro-batch leaves in all chunks together. `saved`: all bytes that
    wait for their backward pass, at most `in_flight` micro-batches of each chunk. `transient`: the bytes that
    are added for a moment: the logits of the loss or one unit of full recomputation, whichever is more.
    """

    microbatch_bytes: int
    saved: int
    transient: int
    in_flight: tuple[int, ...]

    @property
    def total_peak(self) -> int:
        """The largest number of bytes at one moment."""
        return self.saved + self.transient


class OperationBytes(NamedTuple):
    """The bytes that the operations of one family of layers save of one token.

    `element_bytes` is the bytes of an element in the model's arithmetic. Torch's own operations: read off the
    tensors that autograd saves (torch.autograd.graph.saved_tensors_hooks). Fused kernels: memory allocated by
    a forward pass of Transformer Engine's layers on an H200, within 1 % of these. The input of a matrix
    product is not included: every family saves it, and the operation before it decides its width.
    """

    element_bytes: int
    is_fused: bool
    has_shifted_gate: bool  # an unfused gate adds an offset to b, which makes a copy
    has_clamped_gate: bool = False  # gpt-oss's, counted by its code and not measured
    has_sinks: bool = False  # unfused attention always has a mask
    is_frozen: bool = False  # weights, of norms too, beside adapters

    def count_norm_bytes(self, width: int) -> int:
        """Return the bytes of an RMS norm: its input; unfused in fp32, with the normalised input."""
        return (
            width * self.element_bytes + FP32 if self.is_fused else (2 - self.is_frozen) * width * FP32 + FP32
        )

    def count_swiglu_bytes(self, width: int) -> int:
        """Return the bytes of silu(a) * b, whose two halves are `width` wide.

        Fused, it saves the halves alone; else silu(a) too, and b where it is shifted. A clamped gate saves
        the halves before and after the clamp; unfused it also saves a sigmoid, its product and the shifted b.
        """
        if self.has_clamped_gate:
            return (4 if self.is_fused else 7) * width * self.element_bytes
        unfused = 4 if self.has_shifted_gate else 3
        return (2 if self.is_fused else unfused) * width * self.element_bytes

    def count_router_weighting_bytes(self, width: int) -> int:
        """Return the bytes of the product with a router weight, a part of the gate where that is fused."""
        return FP32 if self.is_fused else width * self.element_bytes

    def count_attention_bytes(self, heads: int, groups: int, width: int, value_width: int, cp: int) -> int:
        """Return the bytes of queries, keys, values and a logarithm for each head.

        The output belongs to the projection after it. Unfused attention is torch's cpu kernel: it saves fp32,
        one width, a key head for each query head and an output of its own. It also saves the keys and values
        of all `cp` ranks that share a sequence.
        """
        if self.is_fused:
            return (heads * width + groups * (width + value_width)) * self.element_bytes + heads * FP32
        return heads * ((2 + 2 * cp) * max(width, value_width) + 1) * FP32

    def count_attention_mask_bytes(self, rows: int, cp: int) -> int:
        """Return the bytes of the masks of a sequence, which unfused attention saves in fp32.

        This rank has two chunks of the sequence, with `rows` rows together. Chunk c of 2·cp sees the c + 1
        chunks that end with it; a rank has one chunk from each end.
        """
        if self.has_sinks and not self.is_fused and cp == 1:
            return rows**2 * FP32
        return 0 if self.is_fused or cp == 1 else (rows // 2) ** 2 * (2 * cp + 1) * FP32

    def count_attention_bytes_without_qkv(self, heads: int, width: int, value_width: int, cp: int) -> int:
        """Return the bytes of attention whose queries, keys and values are discarded after it and recomputed.

        Unfused, only tensors that were not copied can be discarded: queries and keys of a model in fp32.
        """
        if self.is_fused:
            return heads * FP32
        shared = 2 * heads * width * FP32 if self.element_bytes == FP32 and cp == 1 else 0
        return self.count_attention_bytes(heads, heads, width, value_width, cp) - shared


class LayerByteCounter:
    """Counts layers for one recipe; experts are assumed to be chosen evenly.

    `tokens` are those of this rank's micro-batch. `stream_tokens` are those that the rank holds between the
    tensor parallel regions: fewer with sequence parallelism.
    """

    def __init__(self, recipe: Recipe, traits: LayerTraits, code: MegatronCode) -> None:
        self.recipe, self.traits = recipe, traits
        parallel, recompute = recipe.parallel, recipe.model.recompute
        size = BF16 if recipe.model.dtype == "bf16" else FP32
        self.saved = OperationBytes(
            size,
            traits.fused_kernels,
            has_shifted_gate=code.has(SHIFTED_GATE_SOURCE_PREDICATE),
            has_clamped_gate=recipe.architecture.gate_limit is not None,
            has_sinks=recipe.architecture.sinks,
            is_frozen=recipe.model.lora is not None,
        )
        self.adapted_matrices = _find_adapted_matrices(recipe)
        # Bytes of an element that only a product reads, and of the FP8 copy of one that others read too.
        fp8 = recipe.model.fp8 if traits.fp8_copy_bytes else None
        self.input_bytes = FP8 if fp8 and not recipe.model.lora else size
        shares = code.has(SHARED_FP8_INPUT_SOURCE_PREDICATE) and fp8 and fp8.scaling != "delayed"
        self.copy_bytes = FP8 if fp8 and not shares and not recipe.model.lora else 0
        # Of an adapter's input that a norm within the product gives: the product keeps it, and its FP8 copy.
        self.adapter_input_bytes = size + (FP8 if fp8 else 0)
        self.cp = parallel.cp
        self.rows = recipe.data.sequence_length // parallel.cp
        self.tokens = count_microbatch_tokens(recipe)
        self.stream_tokens = self.tokens // (parallel.tp if parallel.sequence_parallel else 1)
        self.stream_bytes = self.stream_tokens * recipe.architecture.hidden_size * self.saved.element_bytes
        self.head = HeadBytes(
            self.tokens,
            self.stream_bytes,
            size,
            recipe.architecture.hidden_size,
            compute_local_vocab_size(recipe),
            choose_loss_chunks(recipe),
            is_dpo=recipe.dpo is not None,
            is_frozen=recipe.model.lora is not None,
            is_fused=traits.fused_loss,
        )
        # A rank gets as many copies as it sends, and those of the ranks that hold parts of the same experts.
        moe = recipe.architecture.moe
        self.expert_tokens = self.stream_tokens * moe.topk * parallel.etp if moe else 0
        heads = recipe.architecture.num_attention_heads // parallel.tp
        # The probabilities of all pairs of tokens, where a kernel keeps them; a pack's at most.
        self.score_bytes = (
            recipe.micro_batch_full_rows * heads * self.rows**2 * size if traits.keeps_scores else 0
        )
        takes_workspace = recipe.train.deterministic and recipe.data.packed and not self.score_bytes
        self.workspace_bytes = traits.deterministic_workspace * heads * self.tokens**2 * takes_workspace
        # Full recomputation, or the modules of a selective one.
        self.full_recompute = recompute if recompute is not None and recompute.granularity == "full" else None
        self.recomputed_modules = frozenset(
            recompute.modules if recompute is not None and not self.full_recompute else ()
        )
        # No release recomputes MTP layers by blocks.
        self.recomputes_mtp = bool(
            self.full_recompute
            and self.full_recompute.method == "uniform"
            and code.has(MTP_RECOMPUTATION_SOURCE_PREDICATE)
        )

    def list_layer_bytes(self, chunk: ModelChunk) -> list[int]:
        """Return the bytes of each decoder layer of a chunk."""
        a = self.recipe.architecture
        nets = a.delta_net.layers if a.delta_net else (0,) * a.num_layers
        return [
            self.count_layer_bytes(bool(a.moe_layer_pattern[number]), a.delta_net if nets[number] else None)
            for number in chunk.layers
        ]

    def count_layer_bytes(self, has_experts: bool, delta_net: DeltaNet | None = None) -> int:
        """Return the bytes of one layer, dense or with experts, with attention or a gated delta net."""
        latent, fused = self.recipe.architecture.mla, self.traits.fused_norms
        # Both down-projections of latent attention save an FP8 copy, which is as much as their input.
        first = self._count_norm_bytes(
            is_part_of_projection=fused and latent is None,
            output_bytes=self._count_product_input_bytes(
                fused and latent is None, "self_attention", "qkv", "q_proj", "q_down_proj", "kv_down_proj"
            ),
        )
        attention = self._count_mla_bytes(latent) if latent else self._count_attention_bytes()
        if delta_net is not None:
            attention = self._count_delta_net_bytes(delta_net)
        # A router keeps its input, frozen or not; a recomputed part keeps its own input.
        output_bytes = self._count_product_input_bytes(fused, "mlp", "fc1")
        if has_experts:
            output_bytes = self.saved.element_bytes
        elif "mlp" in self.recomputed_modules:
            output_bytes = 0 if fused else self.saved.element_bytes
        second = self._count_norm_bytes(
            is_part_of_projection=fused and not has_experts, output_bytes=output_bytes
        )
        total = (
            first
            + attention
            + second
            + (self._count_moe_bytes() if has_experts else self._count_dense_bytes())
        )
        return total + (self._count_adapter_bytes(has_experts) if delta_net is None else 0)

    def _rereads_input(self, module: str, *matrices: str) -> bool:
        """Return whether one of a module's matrices, trained or adapted, reads its input again in backward.

        With dropout each adapter reads an input of its own, which `_count_adapter_bytes` counts.
        """
        lora = self.recipe.model.lora
        if self.adapted_matrices is None or lora is None:
            return True
        return not lora.dropout and any(
            f"{module}.linear_{name}" in self.adapted_matrices for name in matrices
        )

    def _count_product_input_bytes(self, is_norm_part: bool, module: str, *matrices: str) -> int:
        """Return the bytes of an element that a module's matrices read; `is_norm_part`: their norm gives it.

        An adapted product keeps what its norm gives, with dropout too.
        """
        if not is_norm_part:
            return self.saved.element_bytes * self._rereads_input(module, *matrices)
        if self.adapted_matrices is None:
            return self.input_bytes
        is_adapted = any(f"{module}.linear_{name}" in self.adapted_matrices for name in matrices)
        return self.adapter_input_bytes * is_adapted

    def _count_adapter_bytes(self, has_experts: bool) -> int:
        """Return the bytes that a layer's adapters save: their matrices, narrow products, inputs, outputs."""
        lora, total, size = self.recipe.model.lora, 0, self.saved.element_bytes
        if lora is None or self.adapted_matrices is None:
            return 0
        moe = self.recipe.architecture.moe
        local_experts = moe.num_experts // self.recipe.parallel.ep if moe else 0
        for name, matrix in self.adapted_matrices.items():
            module = name.partition(".")[0]
            if module == "self_attention" or (module == "mlp") != has_experts:
                rows = self.expert_tokens if (expert := module == "experts") else self.tokens
                stacked = (matrix.columns + matrix.rows) * (local_experts if expert else 1)
                total += (rows + stacked) * matrix.pairs * lora.rank * size
                if lora.dropout:  # the input that is left, and which of it
                    input_rows = rows if matrix.is_cut_input or expert else self.stream_tokens
                    mask = 1 if self.traits.fused_kernels else size
                    total += input_rows * matrix.pairs * matrix.columns * (size + mask)
                if lora.use_dora:  # the output before its rows are scaled; grouped experts: the scales too
                    output_rows = self.stream_tokens if matrix.is_cut_input and not expert else rows
                    total += output_rows * matrix.rows * size * (1 + (expert and self.traits.grouped_experts))
        return total

    def _count_norm_bytes(self, *, is_part_of_projection: bool, output_bytes: int) -> int:
        """Return the bytes of a norm over the residual stream.

        An element of the norm's output has `output_bytes`, 0 where nothing reads it again.
        """
        hidden_size = self.recipe.architecture.hidden_size
        norm_bytes = self.stream_tokens * self.saved.count_norm_bytes(hidden_size)
        if "layernorm" in self.recomputed_modules and not is_part_of_projection:
            return min(norm_bytes, self.stream_bytes)
        return norm_bytes + self.stream_tokens * hidden_size * output_bytes

    def _count_attention_bytes(self) -> int:
        a, tp, size = self.recipe.architecture, self.recipe.parallel.tp, self.saved.element_bytes
        heads, groups, width = a.num_attention_heads // tp, a.num_query_groups // tp, a.kv_channels
        total = self._count_rotary_table_bytes(round(width * a.rotary_fraction))
        if a.qk_layernorm:
            total += self.tokens * (heads + groups) * self.saved.count_norm_bytes(width)
        out = self._count_attention_output_bytes(heads * width)
        if a.output_gate:  # what is multiplied, and the gate in fp32
            total += self.tokens * heads * width * (size + 2 * FP32)
        if "core_attn" in self.recomputed_modules:
            # The values are a view of queries, keys and values together, which therefore stay.
            return total + self.tokens * ((2 * heads + 3 * groups) * width * size + out)
        total += self.saved.count_attention_mask_bytes(self.rows, self.cp) + self.score_bytes
        return total + self.tokens * (
            self.saved.count_attention_bytes(heads, groups, width, width, self.cp) + out
        )

    def _count_mla_bytes(self, mla: MLA) -> int:
        heads, size = (
            self.recipe.architecture.num_attention_heads // self.recipe.parallel.tp,
            self.saved.element_bytes,
        )
        width, value = mla.q_head_dim, mla.v_head_dim
        recomputes_up = "mla_up_proj" in self.recomputed_modules
        total = self._count_rotary_table_bytes(mla.qk_pos_emb_head_dim)
        ranks = ((mla.q_lora_rank, "q_up_proj"), (mla.kv_lora_rank, "kv_up_proj"))
        for rank, up in ((rank, up) for rank, up in ranks if rank):
            # Recomputed from its compressed input, a projection keeps that alone (its norm's, where that is
            # part).
            input_bytes = self._count_product_input_bytes(self.traits.fused_norms, "self_attention", up)
            if recomputes_up and self.traits.fused_norms:
                input_bytes = 0
            total += self.stream_tokens * (self.saved.count_norm_bytes(rank) + rank * input_bytes)
        out = self._count_attention_output_bytes(heads * value)
        if "core_attn" in self.recomputed_modules:
            attention_bytes = heads * (2 * width + value) * size
        elif recomputes_up:
            attention_bytes = self.saved.count_attention_bytes_without_qkv(heads, width, value, self.cp)
        else:
            attention_bytes = self.saved.count_attention_bytes(heads, heads, width, value, self.cp)
        mask = (
            0
            if "core_attn" in self.recomputed_modules
            else self.saved.count_attention_mask_bytes(self.rows, self.cp) + self.score_bytes
        )
        return total + mask + self.tokens * (attention_bytes + out)

    def _count_delta_net_bytes(self, net: DeltaNet) -> int:
        """Return the bytes of a gated delta net as torch computes it, in whole chunks; read off like `saved`.

        In each chunk every head of values has seven squares, and all smaller squares by which the first is
        inverted row by row. The widths are those of the convolved values, of the copies in fp32, and of the
        states.
        """
        tp, size = self.recipe.parallel.tp, self.saved.element_bytes
        keys, values = (heads // tp for heads in (net.num_key_heads, net.num_value_heads))
        key, value = net.key_head_dim, net.value_head_dim
        head = FP32 * (
            DELTA_NET_CHUNK * DELTA_NET_CHUNK // 3
            + 7 * DELTA_NET_CHUNK
            + 2 * key * value // DELTA_NET_CHUNK
            + 6 * key
            + 7 * value
        )
        row = values * (head + 4 * value * size) + keys * key * (4 * size + 2 * FP32)
        return -(-self.rows // DELTA_NET_CHUNK) * DELTA_NET_CHUNK * self.recipe.micro_batch_full_rows * row

    def _count_rotary_table_bytes(self, width: int) -> int:
        """Return the bytes of the cosines and sines for queries and for keys, of every position once."""
        return self.rows * 4 * width * self.saved.element_bytes

    def _count_dense_bytes(self) -> int:
        a = self.recipe.architecture
        if "mlp" in self.recomputed_modules:
            return 0
        return self._count_swiglu_bytes(self.tokens, a.ffn_hidden_size // self.recipe.parallel.tp, "mlp")

    def _count_attention_output_bytes(self, width: int) -> int:
        """Return the bytes of attention's output for one token: the projection or the kernel reads it again.

        In FP8 the projection may save a copy of its own.
        """
        is_saved_by_kernel = (
            self.traits.fused_kernels
            and not self.traits.keeps_scores
            and "core_attn" not in self.recomputed_modules
        )
        is_input_saved = not self.copy_bytes and self._rereads_input("self_attention", "proj")
        is_saved = is_saved_by_kernel or is_input_saved
        return width * (is_saved * self.saved.element_bytes + self.copy_bytes)

    def _count_swiglu_bytes(self, rows: int, width: int, module: str) -> int:
        """Return the bytes of a gate and, where it is read again, of the input of the product after it."""
        return rows * (
            self.saved.count_swiglu_bytes(width)
            + width * self.input_bytes * self._rereads_input(module, "fc2")
        )

    def _count_moe_bytes(self) -> int:
        """Return the bytes of the router, dispatched tokens, experts and shared experts."""
        moe, parallel = self.recipe.architecture.moe, self.recipe.parallel
        assert moe is not None
        if "moe" in self.recomputed_modules:
            return 0
        routing = self.stream_tokens * (moe.num_experts * 2 * FP32 + moe.topk * 2 * ID_BYTES)
        copies = self.expert_tokens
        width = moe.ffn_hidden_size // parallel.etp
        if "moe_act" in self.recomputed_modules:
            inner = copies * 2 * width * self.saved.element_bytes
        else:
            inner = self._count_swiglu_bytes(
                copies, width, "experts"
            ) + copies * self.saved.count_router_weighting_bytes(width)
        shared = 0
        if moe.shared_ffn_hidden_size and "shared_experts" not in self.recomputed_modules:
            shared = self._count_swiglu_bytes(
                self.tokens, moe.shared_ffn_hidden_size // parallel.tp, "shared_experts"
            )
            # Its input is the router's too, which keeps it as it is.
            shared += self.stream_tokens * self.recipe.architecture.hidden_size * self.copy_bytes
        dispatched = copies * self.recipe.architecture.hidden_size * self.input_bytes
        dispatched *= self._rereads_input("experts", "fc1")
        return routing + dispatched + inner + shared


class AdaptedMatrix(NamedTuple):
    """The number of adapters of a matrix, and the number of its columns and rows on a rank."""

    pairs: int
    columns: int
    rows: int
    is_cut_input: bool


def _find_adapted_matrices(recipe: Recipe) -> dict[str, AdaptedMatrix] | None:
    """Return the most adapters that a layer has of a matrix, by name; None where all weights are trained."""
    lora, a = recipe.model.lora, recipe.architecture
    if lora is None:
        return None
    table = Tensors(a)
    layers = [table.build_layer(number, [0]) for number in range(a.num_layers)]
    layers += [table.build_mtp_layer(depth, [0]) for depth in range(a.mtp_layers)]
    matrices: dict[str, AdaptedMatrix] = {}
    for tensor in filter(adapters.is_adaptable, chain.from_iterable(layers)):
        pairs = list(filter(None, adapters.build_adapter_pairs(tensor, lora.targets, lora.rank)))
        *_, module, matrix, _ = tensor.name.replace(".local_experts.0.", ".").split(".")
        if pairs:
            narrow, wide, _ = pairs[0]
            size = recipe.parallel.etp if narrow.is_expert else recipe.parallel.tp
            is_cut_input, columns = narrow.cut is not None, narrow.shape[1] // (size if narrow.cut else 1)
            rows = tensor.shape[0] // (size if wide.cut else 1)
            name, adapted = f"{module}.{matrix}", AdaptedMatrix(len(pairs), columns, rows, is_cut_input)
            matrices[name] = max(adapted, matrices.get(name, adapted))
    return matrices


def estimate_activations(
    recipe: Recipe, layout: RankLayout, stage: int, traits: LayerTraits, code: MegatronCode
) -> ActivationBytes:
    """Return the activations of a rank of a pipeline stage."""
    layer_bytes = LayerByteCounter(recipe, traits, code)
    chunks = layout.stages[stage]
    in_flight_counts = count_in_flight(len(layout.stages), stage, len(chunks), layout.microbatches)
    sizes = [
        _count_chunk_bytes(layer_bytes, chunk) + _count_forwarded_output_bytes(layer_bytes, chunk)
        for chunk in chunks
    ]
    return ActivationBytes(
        microbatch_bytes=sum(sizes),
        saved=sum(size * count for size, count in zip(sizes, in_flight_counts, strict=True)),
        transient=max(
            max(
                _compute_recompute_peak_bytes(layer_bytes, chunk),
                layer_bytes.workspace_bytes,
                layer_bytes.head.count_transient_bytes(chunk.losses),
            )
            + _count_frozen_embedding_output_bytes(layer_bytes, chunk)
            for chunk in chunks
        ),
        in_flight=in_flight_counts,
    )


def count_in_flight(stages: int, stage: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """Return for each chunk of a stage the largest number of micro-batches that wait for backward.

    These are the micro-batches that run before the first backward pass, and one more.

    Source: pipeline_parallel/schedules.py, get_pp_rank_microbatches and the 1F1B schedules.
    """
    if chunks == 1:
        return (min(stages - stage, microbatches),)
    forwards = min((stages - stage - 1) * 2 + (chunks - 1) * stages + 1, microbatches * chunks)
    order = [index % (stages * chunks) // stages for index in range(forwards)]
    return tuple(order.count(chunk) for chunk in range(chunks))


def _count_chunk_bytes(layer_bytes: LayerByteCounter, chunk: ModelChunk) -> int:
    """Return the bytes that one micro-batch leaves in a chunk."""
    embedding = (
        layer_bytes.tokens * ID_BYTES
        + _count_tower_bytes(layer_bytes.recipe, layer_bytes.saved.element_bytes)
    ) * chunk.embedding
    trunk = _count_decoder_bytes(layer_bytes, chunk) + chunk.final_norm * _count_final_norm_bytes(layer_bytes)
    return (
        embedding
        + trunk
        + chunk.mtp_layers * _count_mtp_depth_total_bytes(layer_bytes)
        + layer_bytes.head.count_saved_bytes(chunk.losses)
    )


def _count_forwarded_output_bytes(layer_bytes: LayerByteCounter, chunk: ModelChunk) -> int:
    """Return the bytes of the outputs for the next chunk: of the trunk and of each MTP layer.

    Schedules hold them until backward, because `deallocate_pipeline_outputs` is off.
    """
    return 0 if chunk.head else (1 + chunk.mtp_layers) * layer_bytes.stream_bytes


def _count_frozen_embedding_output_bytes(layer_bytes: LayerByteCounter, chunk: ModelChunk) -> int:
    """Return the bytes of a frozen embedding's outputs and of their gradients.

    Both stay from one micro-batch to the next: the outputs ask for a gradient that nothing before them takes
    (`mcore.adapters.require_output_grad`).
    """
    embedded = chunk.embedding + chunk.mtp_layers
    return 0 if layer_bytes.adapted_matrices is None else 2 * embedded * layer_bytes.stream_bytes


def _count_decoder_bytes(layer_bytes: LayerByteCounter, chunk: ModelChunk) -> int:
    """Return the bytes of the decoder layers; full recomputation keeps only their inputs."""
    layer_sizes = layer_bytes.list_layer_bytes(chunk)
    if layer_bytes.full_recompute is None:
        return sum(layer_sizes)
    unit = layer_bytes.full_recompute.layers or 1
    if layer_bytes.full_recompute.method == "block":
        return min(unit, len(layer_sizes)) * layer_bytes.stream_bytes + sum(layer_sizes[unit:])
    return -(-len(layer_sizes) // unit) * layer_bytes.stream_bytes


def _compute_recompute_peak_bytes(layer_bytes: LayerByteCounter, chunk: ModelChunk) -> int:
    """Return the bytes that recomputation brings back at a time.

    These are the layers of one unit, one MTP layer, or the probabilities of attention.
    """
    if layer_bytes.full_recompute is None:
        return layer_bytes.score_bytes if "core_attn" in layer_bytes.recomputed_modules else 0
    unit = (layer_bytes.full_recompute.layers or 1) if layer_bytes.full_recompute.method == "uniform" else 1
    layer_sizes = layer_bytes.list_layer_bytes(chunk)
    units = [sum(layer_sizes[first : first + unit]) for first in range(0, len(layer_sizes), unit)]
    if chunk.mtp_layers and layer_bytes.recomputes_mtp:
        units.append(_count_mtp_layer_bytes(layer_bytes))
    return max(units, default=0)


def _count_mtp_depth_total_bytes(layer_bytes: LayerByteCounter) -> int:
    """Return the bytes that one depth of multi-token prediction leaves: ids, and the layer or its inputs.

    The ids are those for its embedding.
    """
    return layer_bytes.tokens * ID_BYTES + (
        2 * layer_bytes.stream_bytes if layer_bytes.recomputes_mtp else _count_mtp_layer_bytes(layer_bytes)
    )


def _count_mtp_layer_bytes(layer_bytes: LayerByteCounter) -> int:
    """Return the bytes of one MTP depth: the join of its embedding with the trunk, a layer, a norm."""
    join_input = 2 * layer_bytes.stream_tokens * layer_bytes.recipe.architecture.hidden_size
    return (
        2 * _count_final_norm_bytes(layer_bytes)
        + join_input * layer_bytes.input_bytes * (layer_bytes.adapted_matrices is None)
        + layer_bytes.count_layer_bytes(bool(layer_bytes.recipe.architecture.moe_layer_pattern[-1]))
        + _count_final_norm_bytes(layer_bytes)
    )


def _count_final_norm_bytes(layer_bytes: LayerByteCounter) -> int:
    """Return the bytes of the norm behind the decoder, or behind an MTP layer."""
    return layer_bytes.stream_tokens * layer_bytes.saved.count_norm_bytes(
        layer_bytes.recipe.architecture.hidden_size
    )


def _count_tower_bytes(recipe: Recipe, element_bytes: int) -> int:
    """Return the bytes that a vision tower keeps of a micro-batch of images; 0 without a tower.

    All tokens of the micro-batch stand for images. Every tensor-parallel and context-parallel rank of the
    first stage computes all images. Each has its own part of what is added behind the decoder's first layers.
    """
    vision, parallel = recipe.architecture.vision, recipe.parallel
    if vision is None:
        return 0
    tokens = recipe.micro_batch_full_rows * recipe.data.sequence_length
    ranks = parallel.cp * (parallel.tp if parallel.sequence_parallel else 1)
    added = len(vision.deepstack) * recipe.architecture.hidden_size * element_bytes * tokens // ranks
    training, lora = recipe.model.vision, recipe.model.lora
    if lora is not None:  # all of it is frozen; to adapters of a part of it gradients go as to its weights
        table = Tensors(recipe.architecture).build_tower()
        adapted = any(adapters.build_adapter_pairs(tensor, lora.targets, lora.rank) for tensor in table)
        training = VisionSection(freeze_tower=not adapted, freeze_projector=not adapted)
    return (
        tokens
        * vision.patches_per_embedding
        * count_activation_bytes_per_patch(vision, element_bytes, training)
        + added
    )
