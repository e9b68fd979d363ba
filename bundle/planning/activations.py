"""Activations: bytes that a rank has saved for backward, over its chunks and the micro-batches in flight.

Counted tensor by tensor as Korthikanti et al. do ("Reducing Activation Recomputation in Large Transformer
Models", 2022, section 4), for the layers that are really built: from what one operation saves of a token
(`SavedForBackward`) to one layer, recomputed modules taken out (`LayerBytes`), to a stage (`activations`).
"""

from itertools import chain
from typing import NamedTuple

from bundle.architectures import MLA, DeltaNet, Vision, adapters, padded_vocabulary
from bundle.architectures.tensors import Tensors
from bundle.capabilities import LayerTraits
from bundle.environment.packages import MegatronCode, SourcePredicate
from bundle.planning.layout import Chunk, RankLayout
from bundle.planning.size import BF16, FP32
from bundle.recipe import Recipe
from bundle.recipe.recipe import Vision as Trained

# The gate of experts is computed with glu_linear_offset, zero or not.
SHIFTED_GATE = SourcePredicate("transformer/mlp.py", "glu_linear_offset", "0.15")
# Before it MTP layers are never computed again.
MTP_AGAIN = SourcePredicate("transformer/multi_token_prediction.py", "_checkpointed_forward", "0.14")
ID = 8  # bytes of a token's id, and of an expert's number
CHUNK = 64  # rows that a gated delta net takes at once


class ActivationBytes(NamedTuple):
    """Bytes of one rank of a stage.

    `microbatch`: what one leaves in all chunks together. `held`: all that waits for its backward pass, at
    most `in_flight` micro-batches of each chunk. `passing`: what comes on top for a moment, the logits of the
    loss or one unit of full recomputation, whichever is more.
    """

    microbatch: int
    held: int
    passing: int
    in_flight: tuple[int, ...]

    @property
    def total(self) -> int:
        """The most that is there at once."""
        return self.held + self.passing


class SavedForBackward(NamedTuple):
    """What the operations of one family of layers save of one token, in bytes.

    `size` is the bytes of an element in the model's arithmetic. Torch's own operations: read off the tensors
    that autograd saves (torch.autograd.graph.saved_tensors_hooks). Fused kernels: memory allocated by a
    forward pass of Transformer Engine's layers on an H200, within 1 % of these. The input of a matrix product
    is not in here: every family saves it, and what stands before decides its width.
    """

    size: int
    fused: bool
    shifted_gate: bool  # an unfused gate adds an offset to b, which makes a copy
    clamped_gate: bool = False  # gpt-oss's, counted by its code and not measured
    sinks: bool = False  # unfused attention always has a mask
    frozen: bool = False  # weights, of norms too, beside adapters

    def norm(self, width: int) -> int:
        """An RMS norm: fused, the input as it is; else the input in fp32, and normalised for the weight."""
        return width * self.size + FP32 if self.fused else (2 - self.frozen) * width * FP32 + FP32

    def gate(self, width: int) -> int:
        """silu(a) * b of two halves of `width`: fused, the halves alone; else silu(a) too, and b shifted.

        Clamped: the halves before and behind that, and unfused a sigmoid, its product and b shifted.
        """
        if self.clamped_gate:
            return (4 if self.fused else 7) * width * self.size
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
        if self.sinks and not self.fused and cp == 1:
            return rows**2 * FP32
        return 0 if self.fused or cp == 1 else (rows // 2) ** 2 * (2 * cp + 1) * FP32

    def attention_without_inputs(self, heads: int, width: int, value_width: int, cp: int) -> int:
        """The same where queries, keys and values are discarded after it and computed again.

        Unfused only what was not copied can be: queries and keys of a model in fp32.
        """
        if self.fused:
            return heads * FP32
        shared = 2 * heads * width * FP32 if self.size == FP32 and cp == 1 else 0
        return self.attention(heads, heads, width, value_width, cp) - shared


class LayerBytes:
    """Counts layers for one recipe; experts are taken to be chosen evenly.

    `tokens` are those of this rank's micro-batch, `stream` the ones of them that it holds between the tensor
    parallel regions: fewer with sequence parallelism.
    """

    def __init__(self, recipe: Recipe, traits: LayerTraits, code: MegatronCode) -> None:
        self.recipe, self.traits = recipe, traits
        parallel, recompute = recipe.parallel, recipe.model.recompute
        size = BF16 if recipe.model.dtype == "bf16" else FP32
        self.saved = SavedForBackward(
            size,
            traits.fused_kernels,
            shifted_gate=code.has(SHIFTED_GATE),
            clamped_gate=recipe.architecture.gate_limit is not None,
            sinks=recipe.architecture.sinks,
            frozen=recipe.model.lora is not None,
        )
        self.adapted = _find_adapted_matrices(recipe)
        self.dpo = recipe.dpo is not None
        self.cp = parallel.cp
        self.rows = recipe.data.sequence_length // parallel.cp
        self.tokens = self.rows * recipe.rows
        self.stream = self.tokens // (parallel.tp if parallel.sequence_parallel else 1)
        self.stream_input = self.stream * recipe.architecture.hidden_size * self.saved.size
        # A rank gets as many copies as it sends, and those of the ranks that hold parts of the same experts.
        moe = recipe.architecture.moe
        self.copies = self.stream * moe.topk * parallel.etp if moe else 0
        heads = recipe.architecture.num_attention_heads // parallel.tp
        # The probabilities of all pairs of tokens, where a kernel keeps them; a pack's at most.
        self.scores = recipe.rows * heads * self.rows**2 * size if traits.scores else 0
        # Full recomputation, or the modules of a selective one.
        self.full = recompute if recompute is not None and recompute.granularity == "full" else None
        self.again = frozenset(recompute.modules if recompute is not None and not self.full else ())
        # By blocks no release does it.
        self.mtp_again = bool(self.full and self.full.method == "uniform" and code.has(MTP_AGAIN))

    def layers(self, chunk: Chunk) -> list[int]:
        """The decoder layers of a chunk, one by one."""
        a = self.recipe.architecture
        nets = a.delta_net.layers if a.delta_net else (0,) * a.num_layers
        return [
            self.layer(bool(a.layer_pattern[number]), a.delta_net if nets[number] else None)
            for number in chunk.layers
        ]

    def layer(self, experts: bool, net: DeltaNet | None = None) -> int:
        """One layer, dense or with experts, with attention or a gated delta net."""
        latent, fused = self.recipe.architecture.mla, self.traits.fused_norms
        first = self._norm(
            part_of_projection=fused and latent is None,
            read=self._learns("self_attention", "qkv", "q_proj", "q_down_proj", "kv_down_proj"),
        )
        attention = self._latent_attention(latent) if latent else self._attention()
        if net is not None:
            attention = self._delta_net(net)
        # A router keeps its input, frozen or not; a part that is computed again, what it begins with.
        read = experts or "mlp" in self.again or self._learns("mlp", "fc1")
        second = self._norm(part_of_projection=fused and not experts, read=read)
        own = first + attention + second + (self._experts() if experts else self._dense())
        return own + (self._low_rank(experts) if net is None else 0)

    def _learns(self, module: str, *matrices: str) -> bool:
        """Whether one of a module's matrices reads its input again in backward: it is trained, or adapted.

        With dropout each adapter reads an input of its own, which `_low_rank` counts.
        """
        lora = self.recipe.model.lora
        if self.adapted is None or lora is None:
            return True
        return not lora.dropout and any(f"{module}.linear_{name}" in self.adapted for name in matrices)

    def _low_rank(self, experts: bool) -> int:
        """What adapters of a layer make of their inputs, before it is widened again."""
        lora, total = self.recipe.model.lora, 0
        if lora is None or self.adapted is None:
            return 0
        for name, matrix in self.adapted.items():
            module = name.partition(".")[0]
            if module == "self_attention" or (module == "mlp") != experts:
                rows = self.copies if module == "experts" else self.tokens
                total += rows * matrix.pairs * lora.rank * self.saved.size
                if lora.dropout:  # the input that is left, and which of it
                    seen = rows if matrix.is_cut_input or module == "experts" else self.stream
                    mask = 1 if self.traits.fused_kernels else self.saved.size
                    total += seen * matrix.pairs * matrix.columns * (self.saved.size + mask)
        return total

    def _norm(self, *, part_of_projection: bool, read: bool) -> int:
        """A norm over the residual stream, and its output where what follows has to `read` it again."""
        whole = self.stream * self.saved.norm(self.recipe.architecture.hidden_size)
        if "layernorm" in self.again and not part_of_projection:
            return min(whole, self.stream_input)
        return whole + self.stream_input * read

    def _attention(self) -> int:
        a, tp, size = self.recipe.architecture, self.recipe.parallel.tp, self.saved.size
        heads, groups, width = a.num_attention_heads // tp, a.num_query_groups // tp, a.kv_channels
        total = self._rotation(round(width * a.rotary_fraction))
        if a.qk_layernorm:
            total += self.tokens * (heads + groups) * self.saved.norm(width)
        out = heads * width * size * self._output_kept()
        if a.output_gate:  # what is multiplied, and the gate in fp32
            total += self.tokens * heads * width * (size + 2 * FP32)
        if "core_attn" in self.again:
            # The values are a view of queries, keys and values together, which therefore stay.
            return total + self.tokens * ((2 * heads + 3 * groups) * width * size + out)
        total += self.saved.mask(self.rows, self.cp) + self.scores
        return total + self.tokens * (self.saved.attention(heads, groups, width, width, self.cp) + out)

    def _latent_attention(self, mla: MLA) -> int:
        heads, size = self.recipe.architecture.num_attention_heads // self.recipe.parallel.tp, self.saved.size
        width, value = mla.q_head_dim, mla.v_head_dim
        up_again = "mla_up_proj" in self.again
        total = self._rotation(mla.qk_pos_emb_head_dim)
        ranks = ((mla.q_lora_rank, "q_up_proj"), (mla.kv_lora_rank, "kv_up_proj"))
        for rank, up in ((rank, up) for rank, up in ranks if rank):
            # Recomputed from its compressed input, a projection keeps that alone (its norm's, where that is
            # part).
            read = self._learns("self_attention", up) and not (up_again and self.traits.fused_norms)
            total += self.stream * (self.saved.norm(rank) + read * rank * size)
        out = heads * value * size * self._output_kept()
        if "core_attn" in self.again:
            kept = heads * (2 * width + value) * size
        elif up_again:
            kept = self.saved.attention_without_inputs(heads, width, value, self.cp)
        else:
            kept = self.saved.attention(heads, heads, width, value, self.cp)
        mask = 0 if "core_attn" in self.again else self.saved.mask(self.rows, self.cp) + self.scores
        return total + mask + self.tokens * (kept + out)

    def _delta_net(self, net: DeltaNet) -> int:
        """A gated delta net as torch computes it, chunk by chunk, whole ones; read off like `saved`.

        Of a chunk each head of values has seven squares, and all smaller ones by which the first is inverted
        row by row; the widths are those of what is convolved, of copies in fp32, and of states.
        """
        tp, size = self.recipe.parallel.tp, self.saved.size
        keys, values = (heads // tp for heads in (net.num_key_heads, net.num_value_heads))
        key, value = net.key_head_dim, net.value_head_dim
        head = FP32 * (CHUNK * CHUNK // 3 + 7 * CHUNK + 2 * key * value // CHUNK + 6 * key + 7 * value)
        row = values * (head + 4 * value * size) + keys * key * (4 * size + 2 * FP32)
        return -(-self.rows // CHUNK) * CHUNK * self.recipe.rows * row

    def _rotation(self, width: int) -> int:
        """Cosines and sines for queries and for keys, of every position once."""
        return self.rows * 4 * width * self.saved.size

    def _dense(self) -> int:
        a = self.recipe.architecture
        if "mlp" in self.again:
            # Its input is the norm's output, or the norm's own input where the norm is part of it.
            return -self.stream_input if self.traits.fused_norms else 0
        return self._gated(self.tokens, a.ffn_hidden_size // self.recipe.parallel.tp, "mlp")

    def _output_kept(self) -> bool:
        """Whether attention's output stays: the projection reads it again, or the kernel itself."""
        kernel = self.traits.fused_kernels and not self.traits.scores and "core_attn" not in self.again
        return kernel or self._learns("self_attention", "proj")

    def _gated(self, rows: int, width: int, module: str) -> int:
        """A gate and, where it is read again, the input of the product after it."""
        return rows * (self.saved.gate(width) + width * self.saved.size * self._learns(module, "fc2"))

    def _experts(self) -> int:
        """Router, dispatched tokens, experts and shared experts."""
        moe, parallel = self.recipe.architecture.moe, self.recipe.parallel
        assert moe is not None
        if "moe" in self.again:
            return 0
        routing = self.stream * (moe.num_experts * 2 * FP32 + moe.topk * 2 * ID)
        copies = self.copies
        width = moe.ffn_hidden_size // parallel.etp
        if "moe_act" in self.again:
            inner = copies * 2 * width * self.saved.size
        else:
            inner = self._gated(copies, width, "experts") + copies * self.saved.weighted(width)
        shared = 0
        if moe.shared_ffn_hidden_size and "shared_experts" not in self.again:
            shared = self._gated(self.tokens, moe.shared_ffn_hidden_size // parallel.tp, "shared_experts")
        dispatched = copies * self.recipe.architecture.hidden_size * self.saved.size
        dispatched *= self._learns("experts", "fc1")
        return routing + dispatched + inner + shared


class AdaptedMatrix(NamedTuple):
    """How many adapters a matrix has, and the columns of it that a rank has."""

    pairs: int
    columns: int
    is_cut_input: bool


def _find_adapted_matrices(recipe: Recipe) -> dict[str, AdaptedMatrix] | None:
    """The adapters of each matrix, by its name in a layer, where it has most; None: all is trained."""
    lora, a = recipe.model.lora, recipe.architecture
    if lora is None:
        return None
    table = Tensors(a)
    layers = [table.layer(number, [0]) for number in range(a.num_layers)]
    layers += [table.mtp_layer(depth, [0]) for depth in range(a.mtp_layers)]
    matrices: dict[str, AdaptedMatrix] = {}
    for tensor in filter(adapters.adaptable, chain.from_iterable(layers)):
        pairs = [pair for pair in adapters.pairs(tensor, lora.targets, lora.rank) if pair is not None]
        *_, module, matrix, _ = tensor.name.replace(".local_experts.0.", ".").split(".")
        if pairs:
            narrow = pairs[0].a
            size = recipe.parallel.etp if narrow.expert else recipe.parallel.tp
            columns = narrow.shape[1] // (size if narrow.cut else 1)
            name, adapted = f"{module}.{matrix}", AdaptedMatrix(len(pairs), columns, narrow.cut is not None)
            matrices[name] = max(adapted, matrices.get(name, adapted))
    return matrices


def activations(
    recipe: Recipe, layout: RankLayout, stage: int, traits: LayerTraits, code: MegatronCode
) -> ActivationBytes:
    """The activations of a rank of a pipeline stage."""
    each = LayerBytes(recipe, traits, code)
    chunks = layout.stages[stage]
    flying = in_flight(len(layout.stages), stage, len(chunks), layout.microbatches)
    sizes = [_chunk(each, chunk) + _sent(each, chunk) for chunk in chunks]
    return ActivationBytes(
        microbatch=sum(sizes),
        held=sum(size * count for size, count in zip(sizes, flying, strict=True)),
        passing=max(
            max(_recomputed(each, chunk), _logits(each, chunk)) + _asked(each, chunk) for chunk in chunks
        ),
        in_flight=flying,
    )


def in_flight(stages: int, stage: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """For each chunk of a stage how many micro-batches wait at most: those run before the first backward, and
    one.

    Source: pipeline_parallel/schedules.py, get_pp_rank_microbatches and the 1F1B schedules.
    """
    if chunks == 1:
        return (min(stages - stage, microbatches),)
    forwards = min((stages - stage - 1) * 2 + (chunks - 1) * stages + 1, microbatches * chunks)
    order = [index % (stages * chunks) // stages for index in range(forwards)]
    return tuple(order.count(chunk) for chunk in range(chunks))


def _chunk(each: LayerBytes, chunk: Chunk) -> int:
    """What one micro-batch leaves in a chunk."""
    embedding = (each.tokens * ID + _tower(each.recipe, each.saved.size)) * chunk.embedding
    trunk = _decoder(each, chunk) + chunk.final_norm * _norm(each)
    return embedding + trunk + chunk.mtp_layers * _mtp(each) + _losses(each, chunk)


def _sent(each: LayerBytes, chunk: Chunk) -> int:
    """What goes on to the next chunk, of the trunk and of each MTP layer: schedules hold it until backward,
    as `deallocate_pipeline_outputs` is left off.
    """
    return 0 if chunk.head else (1 + chunk.mtp_layers) * each.stream_input


def _asked(each: LayerBytes, chunk: Chunk) -> int:
    """A frozen embedding's outputs and their gradients, which stay from one micro-batch to the next one's:
    what is asked for a gradient that nothing before it takes (`mcore.adapters.differentiate`).
    """
    embedded = chunk.embedding + chunk.mtp_layers
    return 0 if each.adapted is None else 2 * embedded * each.stream_input


def _decoder(each: LayerBytes, chunk: Chunk) -> int:
    """The decoder layers, of which full recomputation keeps the inputs only."""
    whole = each.layers(chunk)
    if each.full is None:
        return sum(whole)
    unit = each.full.layers or 1
    if each.full.method == "block":
        return min(unit, len(whole)) * each.stream_input + sum(whole[unit:])
    return -(-len(whole) // unit) * each.stream_input


def _recomputed(each: LayerBytes, chunk: Chunk) -> int:
    """What recomputation brings back at a time: the layers of one unit, one MTP layer, or probabilities."""
    if each.full is None:
        return each.scores if "core_attn" in each.again else 0
    unit = (each.full.layers or 1) if each.full.method == "uniform" else 1
    whole = each.layers(chunk)
    units = [sum(whole[first : first + unit]) for first in range(0, len(whole), unit)]
    if chunk.mtp_layers and each.mtp_again:
        units.append(_mtp_layer(each))
    return max(units, default=0)


def _mtp(each: LayerBytes) -> int:
    """What is left of one depth of multi-token prediction: ids for its embedding, the layer or its inputs."""
    return each.tokens * ID + (2 * each.stream_input if each.mtp_again else _mtp_layer(each))


def _mtp_layer(each: LayerBytes) -> int:
    """One depth of multi-token prediction: the join of its embedding with the trunk, a layer, a norm."""
    joined = 2 * _norm(each) + 2 * each.stream_input * (each.adapted is None)
    return joined + each.layer(bool(each.recipe.architecture.layer_pattern[-1])) + _norm(each)


def _norm(each: LayerBytes) -> int:
    """The norm behind the decoder, or behind an MTP layer."""
    return each.stream * each.saved.norm(each.recipe.architecture.hidden_size)


def _losses(each: LayerBytes, chunk: Chunk) -> int:
    """The output layer's input of each loss, and its softmax over the vocabulary, in fp32.

    A preference's loss keeps the logits as they came.
    """
    vocabulary, scored = _vocabulary(each), chunk.head and each.dpo
    kept = (chunk.losses - scored) * vocabulary * FP32 + scored * vocabulary * each.saved.size
    of_head = each.stream_input * (each.adapted is None)
    return chunk.losses * (of_head + each.tokens * ID) + each.tokens * kept


def _logits(each: LayerBytes, chunk: Chunk) -> int:
    """The logits of every loss beside their softmax, and the fp32 copy of a fused loss.

    A preference's loss has its gradient there; what it computes at a time is no more than a workspace.
    """
    if not chunk.head:
        return 0
    others = chunk.losses - each.dpo
    copies = 0 if each.saved.size == FP32 else others * each.saved.size
    fused = FP32 if each.traits.fused_loss and others else 0
    whole = each.tokens * _vocabulary(each)
    return whole * (copies + fused + each.dpo * each.saved.size)


def _vocabulary(each: LayerBytes) -> int:
    tp = each.recipe.parallel.tp
    return padded_vocabulary(each.recipe.architecture.vocab_size, tp) // tp


def _tower(recipe: Recipe, size: int) -> int:
    """What a vision tower keeps of a micro-batch all of whose tokens stand for images; 0 without a tower.

    Every tensor-parallel and context-parallel rank of the first stage computes all images, and has its own
    part of what is added behind the decoder's first layers.
    """
    vision, parallel = recipe.architecture.vision, recipe.parallel
    if vision is None:
        return 0
    tokens = recipe.rows * recipe.data.sequence_length
    ranks = parallel.cp * (parallel.tp if parallel.sequence_parallel else 1)
    added = len(vision.deepstack) * recipe.architecture.hidden_size * size * tokens // ranks
    how, lora = recipe.model.vision, recipe.model.lora
    if lora is not None:  # all of it is frozen; to adapters of a part of it gradients go as to its weights
        table = Tensors(recipe.architecture).tower()
        adapted = any(adapters.pairs(tensor, lora.targets, lora.rank) for tensor in table)
        how = Trained(freeze_tower=not adapted, freeze_projector=not adapted)
    return tokens * vision.patches * bytes_of_a_patch(vision, size, how) + added


def bytes_of_a_patch(vision: Vision, size: int, how: Trained) -> int:
    """What a tower keeps of one patch, whose numbers have `size` bytes each, for what is trained of it.

    Read off the tensors that autograd saves in transformers' towers, with torch's own operations and
    attention. What is frozen keeps no inputs of its matrices, and nothing before what is trained.
    """
    width, heads, ffn = vision.hidden_size, vision.num_attention_heads, vision.ffn_hidden_size
    windows = vision.family == "qwen2_5_vl"
    if windows:
        norm, matrices = width * (FP32 + size) + FP32, 4
        behind, inputs = norm + 3 * width * size, 3 * width * size
        alone = 4 * width * size + ID // vision.patches
    else:
        norm, matrices = (width + 2) * size, 2
        behind = norm + 3 * width * size
        behind += len(vision.deepstack) * (3 * width * size + 2 * size // vision.patches)
        inputs = (1 + len(vision.deepstack)) * 2 * width * size
        # Inputs of mergers that nothing else keeps.
        alone = behind + len({*vision.deepstack} - {vision.num_layers - 1}) * width * size
    if how.freeze_tower:
        return 0 if how.freeze_projector else alone
    # Norms' outputs, queries, keys and values, before and after they are turned, and what attention gives.
    attention = 9 * width * size + heads * FP32
    turned = 2 * (width // heads) * FP32  # cosines and sines, once for all blocks
    block = 2 * norm + attention + matrices * ffn * size
    positions = 0 if windows else 4 * (ID + FP32)  # the four learned ones around a patch
    of_tower = vision.num_layers * block + positions + turned + vision.patch_values * size
    return of_tower + behind - (inputs if how.freeze_projector else 0)
