"""The roofline: a prediction of the time of a step from FLOPs, bytes, messages and launched kernels.

The coefficients are fitted to single measurements on H100 and H200 (`COEFFICIENTS_BY_TERM`), and
docs/performance.md compares the prediction with its table. Other devices are predicted in proportion to their
published peak.
"""

from collections.abc import Iterator
from typing import NamedTuple

from bundle.capabilities import LayerTraits, Peak
from bundle.environment.packages import MegatronCode
from bundle.planning.activations import LayerByteCounter
from bundle.planning.layout import ModelChunk, RankLayout
from bundle.planning.size import BF16, FP32, LayerFlops, count_attention_pairs, list_layer_flops
from bundle.recipe import Recipe
from bundle.recipe.loss_chunks import choose_loss_chunks

# The published peaks (`capabilities.cuda`) of the devices that coefficients were measured on.
CALIBRATION_FLOPS = 989e12  # FLOP/s of H100 and H200
CALIBRATION_MEMORY = 4.8e12  # bytes/s of H200


class Coefficient(NamedTuple):
    """One number of the roofline, and the row of docs/performance.md that it is fitted to."""

    value: float
    source: str


COEFFICIENTS_BY_TERM = {
    "products": Coefficient(670e12, "FLOP/s; Speed: `gqa.yaml` bf16"),
    "rows": Coefficient(180, "rows at half of that rate; Micro-batches: `latent.yaml`, 2 and 8 rows"),
    "expert_products": Coefficient(0.62, "of the rate; Micro-batches: `latent.yaml`, 2 rows"),
    "attention": Coefficient(550e12, "FLOP/s; Speed: `gqa.yaml` bf16"),
    "attention_cp": Coefficient(1.5, "times the time; Two H200s: packs of 8,192, CP2"),
    "fp8": Coefficient(1.35, "times the rate; Speed: `gqa.yaml` FP8 tensorwise"),
    "adapters": Coefficient(1.14, "times the time; Speed: adapters of gqa"),
    "memory": Coefficient(4e12, "bytes/s; Micro-batches: a copy on one H200"),
    "traffic": Coefficient(4, "times the bytes that a layer keeps; Micro-batches: Qwen3-1.7B"),
    "logits": Coefficient(9, "bytes of each; Large vocabularies: the loss of experts"),
    "launch": Coefficient(50e-6, "s; Two H200s: `latent.yaml`, TP2 ETP1 EP2"),
    "layer_launches": Coefficient(100, "a micro-batch; Rollouts: updates of Qwen3-4B in packs of 2,048"),
    "expert_layer_launches": Coefficient(400, "a micro-batch; Micro-batches: `latent.yaml`, 2 and 8 rows"),
    "fp8_expert_launches": Coefficient(
        10.5, "an expert, layer and micro-batch; Beside transformers and PEFT: experts in FP8 tensorwise"
    ),
    "other_launches": Coefficient(150, "a micro-batch; the same rows"),
    "step_launches": Coefficient(640, "a step; the same rows"),
    "adapter_launches": Coefficient(1.5, "times the launches; Speed: adapters of latent"),
    "link": Coefficient(300e9, "bytes/s; Links: 256 MiB both ways"),
    "network": Coefficient(50e9, "bytes/s of each device, published for DGX H200 (400 Gb/s); not measured"),
    "host_link": Coefficient(50e9, "bytes/s of each device, an assumption about PCIe 5; not measured"),
}
MEASURED_EXPERTS_PER_RANK = 32  # experts of a layer on one rank in these rows
LAUNCHES_PER_EXTRA_EXPERT = 2  # of one more: the products of the gradients of two matrices
OPTIMIZER_BYTES_PER_PARAMETER = (
    30  # of a parameter that the optimizer reads and writes: fp32 weight, gradient, two moments
)
TP_MESSAGES_PER_SUBLAYER = 5  # gathers and scatters of one part of a layer, forward and backward
EP_MESSAGES_PER_LAYER_MICROBATCH = 4  # dispatch and combine, forward and backward
RECOMPUTED_MESSAGE_SHARE = 0.4  # of a layer that is computed again, as a share
ASSUMED_ADAPTER_PARAMETER_SHARE = 0.01  # of a matrix's parameters, roughly
SELECTIVE_RECOMPUTE_SHARE = 0.3  # of a forward pass, roughly


def _get_coefficient(name: str) -> float:
    return COEFFICIENTS_BY_TERM[name].value


class StepTime(NamedTuple):
    """The predicted seconds of one step on the slowest rank."""

    compute: float
    communication: float
    bubble: float  # waits for other pipeline stages
    launches: float  # waits for the host, which launches kernels
    optimizer: float

    @property
    def total(self) -> float:
        """All seconds."""
        return sum(self)

    @property
    def largest_shares(self) -> list[tuple[str, float]]:
        """The parts that take a hundredth of the time or more, with their shares, the largest first."""
        shares = ((name, seconds / self.total) for name, seconds in self._asdict().items())
        return sorted((share for share in shares if share[1] >= 0.01), key=lambda share: -share[1])


class _LayerCost(NamedTuple):
    """The cost of one layer in one micro-batch on one rank."""

    kernels: float = 0.0  # seconds
    messages: float = 0.0  # seconds
    launches: float = 0.0
    dense_parameters: float = 0.0
    expert_parameters: float = 0.0


class Roofline(NamedTuple):
    """The devices that steps are predicted for; without a known peak these are H200."""

    traits: LayerTraits
    code: MegatronCode
    peak: Peak | None
    per_node: int

    @property
    def assumed_device_note(self) -> str:
        """Where the predicted times hold, in words; "" where that is these devices."""
        return "" if self.peak else " on an H200, as no peak of these devices is known"

    def predict(self, recipe: Recipe, layout: RankLayout) -> StepTime:
        """Return the time of a step of this recipe in this layout."""
        return _Step(self, recipe, layout).predict()


class _Step:
    """One recipe in one layout, while its step is predicted."""

    def __init__(self, devices: Roofline, recipe: Recipe, layout: RankLayout) -> None:
        self.recipe, self.layout, self.per_node = recipe, layout, devices.per_node
        # Values are read in bf16 before they are converted to FP8.
        model = recipe.model.model_copy(update={"recompute": None, "fp8": None})
        plain = recipe.model_copy(update={"model": model})
        self.bytes = LayerByteCounter(plain, devices.traits, devices.code)
        self.factor = 2 if recipe.model.lora else 3  # backward products of frozen weights: one, not two
        scale = devices.peak.bf16 / CALIBRATION_FLOPS if devices.peak else 1.0
        memory_scale = devices.peak.memory_bandwidth / CALIBRATION_MEMORY if devices.peak else 1.0
        self.products = (
            _get_coefficient("products") * (_get_coefficient("fp8") if recipe.model.fp8 else 1.0) * scale
        )
        self.attention, self.memory = (
            _get_coefficient("attention") * scale,
            _get_coefficient("memory") * memory_scale,
        )
        kinds = [*recipe.architecture.moe_layer_pattern]
        kinds += kinds[-1:] * recipe.architecture.mtp_layers
        layers = list(zip(list_layer_flops(recipe.architecture), kinds, strict=True))
        costs = {layer: self._compute_layer_cost(*layer) for layer in dict.fromkeys(layers)}
        self.costs = [costs[layer] for layer in layers]

    def predict(self) -> StepTime:
        """Return the time of a step."""
        stages = [self._compute_micro_batch_stage_cost(chunks) for chunks in self.layout.stages]
        busy = [stage.kernels + stage.messages for stage in stages]
        host = [stage.launches * _get_coefficient("launch") for stage in stages]
        slowest = max(range(len(stages)), key=lambda number: max(busy[number], host[number]))
        pace, microbatches = max(busy[slowest], host[slowest]), self.layout.microbatches
        waits = sum(map(max, busy, host)) - pace
        worst = stages[slowest]
        return StepTime(
            compute=microbatches * worst.kernels,
            communication=microbatches * worst.messages + max(map(self._compute_exposed_reduction, stages)),
            bubble=waits / len(self.layout.stages[0]),
            launches=microbatches * max(0.0, pace - busy[slowest]),
            optimizer=max(
                _get_coefficient("step_launches") * _get_coefficient("launch"),
                *map(self._compute_update, stages),
            ),
        )

    def _compute_micro_batch_stage_cost(self, chunks: tuple[ModelChunk, ...]) -> _LayerCost:
        """Return the cost of one micro-batch in all chunks of a stage."""
        architecture, parallel = self.recipe.architecture, self.recipe.parallel
        costs = [self.costs[number] for chunk in chunks for number in chunk.layers]
        recomputed = self._find_recomputed_share(len(costs)) if costs else 0.0
        layers = architecture.num_layers
        for chunk in chunks:
            costs += self.costs[layers : layers + chunk.mtp_layers]
        total = _LayerCost(*map(sum, zip(*costs, strict=True))) if costs else _LayerCost()
        kernels = total.kernels * (1 + recomputed / self.factor)
        messages = total.messages * (1 + RECOMPUTED_MESSAGE_SHARE * recomputed)
        launches = total.launches * (1 + recomputed / 3) + _get_coefficient("other_launches")
        matrix = architecture.vocab_size * architecture.hidden_size / parallel.tp
        dense = total.dense_parameters
        loss_chunks = choose_loss_chunks(self.recipe)
        recomputed_tokens = self.bytes.tokens - loss_chunks.kept_tokens if loss_chunks else 0
        for chunk in chunks:
            dense += matrix * (chunk.embedding + chunk.has_mtp_embedding_copy)
            if chunk.head:
                dense += matrix * (not architecture.tied_embeddings)
                tokens, vocabulary = self.bytes.tokens * chunk.losses, architecture.vocab_size / parallel.tp
                kernels += (
                    2 * matrix * (self.factor * tokens + recomputed_tokens * chunk.losses) / self.products
                )
                kernels += tokens * vocabulary * _get_coefficient("logits") / self.memory
            if parallel.pp > 1:
                messages += 2 * self.bytes.stream_bytes / self._find_bandwidth("pp")
        if self.recipe.model.lora is None:  # gradients are added to fp32 sums: read, read and written
            kernels += (dense + total.expert_parameters) * (BF16 + 2 * FP32) / self.memory
        return _LayerCost(kernels, messages, launches, dense, total.expert_parameters)

    def _find_recomputed_share(self, layers: int) -> float:
        """Return the share of a stage's layers whose forward pass is computed again."""
        recompute = self.recipe.model.recompute
        if recompute is None:
            return 0.0
        if recompute.granularity == "selective":
            return SELECTIVE_RECOMPUTE_SHARE
        return 1.0 if recompute.method == "uniform" else min(1.0, (recompute.layers or 1) / layers)

    def _compute_layer_cost(self, flops: LayerFlops, has_experts: int) -> _LayerCost:
        recipe, parallel, a = self.recipe, self.recipe.parallel, self.recipe.architecture
        tokens, moe = self.bytes.tokens, a.moe if has_experts else None
        pairs = (
            recipe.micro_batch_full_rows
            * count_attention_pairs(recipe.data.sequence_length, flops.window)
            / parallel.cp
        )
        kernels = self.factor * tokens * flops.per_token / parallel.tp / self._compute_rate(tokens)
        attention = 3 * pairs * flops.per_pair / parallel.tp / self.attention
        kernels += attention * (_get_coefficient("attention_cp") if parallel.cp > 1 else 1.0)
        net = a.delta_net if not flops.per_pair else None
        layer_bytes = self.bytes.count_layer_bytes(bool(has_experts), net)
        kernels += layer_bytes * _get_coefficient("traffic") / self.memory
        full_bytes = tokens * a.hidden_size * BF16
        parts = (parallel.tp > 1) * (1 if moe else 2)
        messages = parts * TP_MESSAGES_PER_SUBLAYER * self._compute_gather_seconds("tp", full_bytes)
        launches, dense, experts = _get_coefficient("layer_launches"), flops.per_token / 2 / parallel.tp, 0.0
        if moe is not None:
            local = moe.num_experts / parallel.ep
            routed = self.bytes.stream_tokens * moe.topk
            rows = routed * parallel.etp / local
            rate = self._compute_rate(rows) * _get_coefficient("expert_products")
            kernels += self.factor * routed * flops.per_expert_token / moe.topk / rate
            experts = flops.per_expert_token / moe.topk / 2 * local / parallel.etp
            sent = routed * a.hidden_size * BF16
            messages += EP_MESSAGES_PER_LAYER_MICROBATCH * self._compute_all_to_all(sent)
            messages += EP_MESSAGES_PER_LAYER_MICROBATCH * self._compute_gather_seconds(
                "etp", sent * parallel.etp
            )
            launches = _get_coefficient("expert_layer_launches")
            launches += LAUNCHES_PER_EXTRA_EXPERT * max(0.0, local - MEASURED_EXPERTS_PER_RANK)
            if recipe.model.fp8:  # the weights of each expert are converted, and multiplied, one by one
                launches += _get_coefficient("fp8_expert_launches") * local
        if recipe.model.lora is not None:
            kernels, launches = (
                kernels * _get_coefficient("adapters"),
                launches * _get_coefficient("adapter_launches"),
            )
        return _LayerCost(kernels, messages, launches, dense, experts)

    def _compute_rate(self, rows: float) -> float:
        """Return the FLOP/s of products with so many rows."""
        return self.products * rows / (rows + _get_coefficient("rows"))

    def _count_group_ranks_per_node(self, axis_name: str) -> int:
        """Return the ranks of a group that share a node."""
        axis = self.layout.find_axis(axis_name)
        return max(1, min(axis.size, self.per_node // axis.stride))

    def _find_bandwidth(self, axis_name: str) -> float:
        """Return the bytes/s of a rank in a ring; between nodes every rank of a node has its own port."""
        members, size = self._count_group_ranks_per_node(axis_name), self.layout.find_axis_size(axis_name)
        link = _get_coefficient("link")
        return link if members == size else min(link, _get_coefficient("network") * members)

    def _compute_gather_seconds(self, axis_name: str, full_bytes: float) -> float:
        """Return the seconds of a gather or a scatter of so many bytes, all ranks' together."""
        size = self.layout.find_axis_size(axis_name)
        return full_bytes * (size - 1) / size / self._find_bandwidth(axis_name)

    def _compute_all_to_all(self, sent_bytes: float) -> float:
        """Return the seconds in which a rank sends its bytes to all ranks of its expert group."""
        size, members = self.layout.find_axis_size("ep"), self._count_group_ranks_per_node("ep")
        inside, outside = (members - 1) / size, (size - members) / size
        return sent_bytes * (inside / _get_coefficient("link") + outside / _get_coefficient("network"))

    def _iterate_parameter_groups_with_bandwidth(
        self, stage: _LayerCost
    ) -> Iterator[tuple[float, int, float]]:
        """Yield (trained parameters, ranks that hold the same, bytes/s between them) of a stage's rank."""
        dp, cp = self.layout.find_axis_size("dp"), self.layout.find_axis_size("cp")
        share = ASSUMED_ADAPTER_PARAMETER_SHARE if self.recipe.model.lora is not None else 1.0
        yield stage.dense_parameters * share, dp * cp, self._find_bandwidth("dp" if dp > 1 else "cp")
        expert_dp = self.layout.find_axis_size("expert-dp")
        yield stage.expert_parameters * share, expert_dp, self._find_bandwidth("expert-dp")

    def _compute_exposed_reduction(self, stage: _LayerCost) -> float:
        """Return the seconds of reducing gradients and gathering weights that nothing hides."""
        seconds = sum(
            parameters * (FP32 + BF16) * (size - 1) / size / bandwidth
            for parameters, size, bandwidth in self._iterate_parameter_groups_with_bandwidth(stage)
        )
        hidden = self.layout.microbatches * stage.kernels / 2 * self.recipe.distributed.overlap_grad_reduce
        return max(0.0, seconds - hidden)

    def _compute_update(self, stage: _LayerCost) -> float:
        """Return the seconds of the optimizer's kernels, or of its way to the host and back."""
        optimizer, seconds = self.recipe.optimizer, 0.0
        moved = optimizer.optimizer_offload_fraction * optimizer.optimizer_cpu_offload
        for parameters, size, _ in self._iterate_parameter_groups_with_bandwidth(stage):
            share = parameters / (size if optimizer.use_distributed_optimizer else 1)
            seconds += parameters * 2 * FP32 / self.memory  # gradients: set to zero, and their norm
            seconds += share * (1 - moved) * OPTIMIZER_BYTES_PER_PARAMETER / self.memory
            seconds += share * moved * OPTIMIZER_BYTES_PER_PARAMETER / _get_coefficient("host_link")
        return seconds
