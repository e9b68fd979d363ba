"""The memory estimate: bytes of weights, gradients, optimizer state and activations on every rank.

The bytes are those that megatron-core allocates. The activations are added to see whether a device has as
much.

Megatron's data-parallel wrapper lays parameters in one contiguous buffer and gradients in another, both whole
on every data-parallel rank. The distributed optimizer divides the rest: with bf16 an fp32 copy of the
weights, and Adam's two moments in fp32 (DistributedOptimizer._build_model_and_main_param_groups). Without it
every rank has all of that, and nothing is padded. A precision-aware optimizer keeps the types of the recipe.
An offloaded part is on the host, where its gradient is copied to as well (HybridDeviceOptimizer).

A buffer with the distributed optimizer: parameters go in from the last to the first, each at a multiple of 64
elements. A bucket ends at a multiple of lcm(ranks, 128), and every rank's part is equal and aligned
(_ParamAndGradBuffer.__init__ in 0.12 to 0.17, DistributedOptimizer._compute_per_buffer_param_layout from
0.18).
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, Self

from bundle.capabilities import LayerTraits
from bundle.environment.machine import DetectedValue, Hardware
from bundle.environment.packages import MegatronCode, SourcePredicate
from bundle.errors import format_bytes
from bundle.planning.activations import ActivationBytes, estimate_activations
from bundle.planning.layout import ModelChunk, RankLayout
from bundle.planning.rollout import RolloutBytes, estimate_rollout
from bundle.planning.size import (
    BF16,
    DTYPE_BYTES,
    FP8_GEMM_WEIGHT_PATTERN,
    FP32,
    LocalParameter,
    list_parameters,
    list_trained_parameters,
)
from bundle.recipe import Recipe
from bundle.recipe.sections import Optimizer

# Experts whose tensor parallel size is not the dense one get the experts' groups even at ep 1; before, their
# gradients are reduced like dense ones.
ETP_EXPERT_GROUPS_SOURCE_MARKER = SourcePredicate("tensor_parallel/layers.py", "use_expert_pgs", "0.19")
PARAMETER_START_MULTIPLE = 64
BUCKET_MULTIPLE = 128
# Share that a plan does not count: the device's context, communication buffers, workspaces, fragmentation.
HEADROOM = 0.1


class StateBytes(NamedTuple):
    """Bytes of one rank.

    `moments` are those of any optimizer; `counters` are the step counts of torch's own Adam; `quantized` are
    the copies that FP8 products keep of their weights. `host` is the part of an offloaded optimizer on the
    host; all else is on the device.
    """

    parameters: int = 0
    gradients: int = 0
    master: int = 0
    moments: int = 0
    counters: int = 0
    quantized: int = 0
    host: int = 0

    @property
    def device_total(self) -> int:
        """All bytes on the device."""
        return sum(self) - self.host


class MemoryEstimate(NamedTuple):
    """Bytes of the rank of a pipeline stage that needs the most."""

    stage: int
    states: StateBytes
    activations: ActivationBytes
    rollout: RolloutBytes = RolloutBytes()

    @property
    def peak_bytes(self) -> int:
        """Bytes at the worst moment of a step: nothing is learned while answers are sampled."""
        return max(self.learning_peak, self.sampling_peak)

    @property
    def learning_peak(self) -> int:
        """Bytes at the peak of an update."""
        return (
            self.states.device_total
            + self.rollout.weights
            + self.rollout.overhead
            + self.activations.total_peak
        )

    @property
    def sampling_peak(self) -> int:
        """Bytes at the peak of sampling and of a sync."""
        return (
            self.states.device_total + self.rollout.weights + self.rollout.overhead + self.rollout.transient
        )


def estimate_memory(
    recipe: Recipe, layout: RankLayout, traits: LayerTraits, code: MegatronCode
) -> tuple[MemoryEstimate, ...]:
    """Return the estimate of every pipeline stage."""
    buffers = StateBuffers.from_recipe(recipe, layout, traits, code)
    rollout = estimate_rollout(recipe, layout.world) if recipe.rl is not None else RolloutBytes()
    return tuple(
        MemoryEstimate(
            stage=stage,
            states=buffers.compute_largest_bytes(stage),
            activations=estimate_activations(recipe, layout, stage, traits, code),
            rollout=rollout,
        )
        for stage in range(len(layout.stages))
    )


def find_device_or_host_memory(hardware: Hardware, per_node: int) -> float | None:
    """Return the bytes that a rank has: those of its device, or its share of the host; None: unknown."""
    if hardware.backend != "cpu":
        return hardware.smallest_device_memory.value
    host = hardware.host.memory.value
    return None if host is None else host / per_node


def describe_tight_memory(stages: Sequence[MemoryEstimate], device: DetectedValue[int]) -> str | None:
    """Return a warning where the job fits by numbers but leaves little for what is not counted."""
    worst = max((estimate.peak_bytes for estimate in stages), default=0)
    if device.value is None or not device.value * (1 - HEADROOM) < worst <= device.value:
        return None
    return (
        f"memory is tight: {format_bytes(worst)} of {format_bytes(device.value)}, without the device's"
        " context, communication buffers and fragmentation"
    )


class BufferSpan(NamedTuple):
    """The elements [start, end) of a buffer that hold one parameter."""

    parameter: LocalParameter
    start: int
    end: int


class ParameterBuffer(NamedTuple):
    """One buffer of one model chunk; each bucket is divided equally between `ranks` data-parallel ranks."""

    ranks: int
    spans: tuple[BufferSpan, ...]
    buckets: tuple[tuple[int, int], ...]  # [start, end) of each

    @classmethod
    def from_parameters(
        cls,
        parameters: Sequence[LocalParameter],
        ranks: int,
        bucket_size: int | None = None,
        *,
        is_divided: bool = True,
    ) -> Self:
        """Return the buffer of these parameters, in registration order; `bucket_size` None: one bucket.

        A bucket closes once it holds `bucket_size` elements. An embedding that two stages share has a bucket
        of its own. Only a buffer that is divided between ranks (`is_divided`) is padded.
        """
        multiple, start_multiple = (
            (math.lcm(ranks, BUCKET_MULTIPLE), PARAMETER_START_MULTIPLE) if is_divided else (1, 1)
        )
        spans: list[BufferSpan] = []
        buckets: list[tuple[int, int]] = []
        start = bucket_start = 0

        def close_bucket(end: int) -> int:
            buckets.append((bucket_start, _round_up(end, multiple)))
            return buckets[-1][1]

        for parameter in reversed(parameters):
            start = _round_up(start, start_multiple)
            if parameter.shared_embedding and start > bucket_start:
                start = bucket_start = close_bucket(start)
            end = start + parameter.elements
            spans.append(BufferSpan(parameter, start, end))
            is_full = bucket_size is not None and end - bucket_start >= bucket_size
            start = end
            if is_full or parameter.shared_embedding:
                start = bucket_start = close_bucket(end)
        if start > bucket_start:
            close_bucket(start)
        return cls(ranks, tuple(spans), tuple(buckets))

    @property
    def elements(self) -> int:
        """The size of the buffer, padding included."""
        return self.buckets[-1][1] if self.buckets else 0

    def iterate_element_and_tensor_deltas(self) -> Iterator[tuple[int, int, int]]:
        """Yield where the part of a rank differs from that of the rank before it: (rank, elements, tensors).

        The part is what the rank keeps optimizer state for. Ranks are not counted one by one: between the
        ends of a tensor all keep the same, however many they are.
        """
        bucket = 0
        for span in self.spans:
            while span.start >= self.buckets[bucket][1]:
                bucket += 1
            first, last = self.buckets[bucket]
            share = (last - first) // self.ranks
            begin, end = (span.start - first) // share, (span.end - first - 1) // share
            for rank, until in {(begin, begin + 1), (begin + 1, end), (end, end + 1)}:
                if rank < until:
                    elements = min(span.end, first + (rank + 1) * share) - max(
                        span.start, first + rank * share
                    )
                    yield rank, elements, 1
                    yield until, -elements, -1


class StateBuffers(NamedTuple):
    """The buffers of every stage, which determine the bytes of every rank."""

    layout: RankLayout
    stages: tuple[tuple[tuple[ParameterBuffer, ParameterBuffer], ...], ...]  # stage, chunk, (dense, expert)
    is_bf16: bool
    optimizer: Optimizer
    traits: LayerTraits
    frozen_elements: tuple[int, ...]  # weights beside the buffers of every stage, which stay as they are
    fp8_elements: tuple[int, ...]  # weights of every stage's FP8 products

    @classmethod
    def from_recipe(cls, recipe: Recipe, layout: RankLayout, traits: LayerTraits, code: MegatronCode) -> Self:
        """Return the buffers of a recipe for this code of megatron-core, with a backend's layers."""
        stages = tuple(
            tuple(_build_buffers(recipe, layout, chunk, traits, code) for chunk in chunks)
            for chunks in layout.stages
        )
        frozen_elements, fp8_elements = (
            tuple(sum(count_elements(recipe, chunk, traits) for chunk in chunks) for chunks in layout.stages)
            for count_elements in (_count_frozen_elements, _count_fp8_gemm_elements)
        )
        return cls(
            layout,
            stages,
            recipe.model.dtype == "bf16",
            recipe.optimizer,
            traits,
            frozen_elements,
            fp8_elements,
        )

    def compute_rank_bytes(self, rank: int) -> StateBytes:
        """Return the bytes of one rank."""
        pp = self.layout.find_axis("pp")
        stage, rank_in_stage = pp.find_rank_in_group(rank), rank % pp.stride
        *_, sizes = (
            sizes for first, *sizes in self._list_rank_range_state_counts(stage) if first <= rank_in_stage
        )
        return self._compute_bytes(stage, *sizes)

    def compute_largest_bytes(self, stage: int) -> StateBytes:
        """Return the bytes of the rank of a stage that needs the most: the padding falls on the others."""
        candidates = (
            self._compute_bytes(stage, *sizes) for _, *sizes in self._list_rank_range_state_counts(stage)
        )
        return max(candidates, key=lambda states: states.device_total)

    def _count_buffer_elements(self, stage: int) -> int:
        """Return the sum of the sizes of a stage's buffers, padding included."""
        return sum(buffer.elements for buffers in self.stages[stage] for buffer in buffers)

    def _list_rank_range_state_counts(self, stage: int) -> list[tuple[int, int, int]]:
        """Return (rank, elements, tensors) of optimizer state that a stage's ranks keep from that rank on."""
        if not self.optimizer.use_distributed_optimizer:
            spans = [span for buffers in self.stages[stage] for buffer in buffers for span in buffer.spans]
            return [(0, sum(span.parameter.elements for span in spans), len(spans))]
        # Ranks that differ in tp alone keep the same share of dense buffers; of experts', in etp or ep.
        strides = self.layout.find_axis("cp").stride, self.layout.find_axis("expert-dp").stride
        changes = {0: (0, 0)}
        for buffers in self.stages[stage]:
            for buffer, stride in zip(buffers, strides, strict=True):
                for share, elements, tensors in buffer.iterate_element_and_tensor_deltas():
                    before = changes.get(share * stride, (0, 0))
                    changes[share * stride] = before[0] + elements, before[1] + tensors
        totals = accumulate(
            (changes[rank] for rank in sorted(changes)), lambda a, b: (a[0] + b[0], a[1] + b[1])
        )
        stage_ranks = self.layout.find_axis("pp").stride
        return [
            (rank, *sizes) for rank, sizes in zip(sorted(changes), totals, strict=True) if rank < stage_ranks
        ]

    def _compute_bytes(self, stage: int, share: int, tensors: int) -> StateBytes:
        elements, optimizer = self._count_buffer_elements(stage), self.optimizer
        is_adam, states = optimizer.name == "adam", len(optimizer.state_names)
        master, moments = FP32 if self.is_bf16 else 0, states * FP32
        offloaded = 0
        if optimizer.optimizer_cpu_offload:  # whole tensors of a rank's share, until it is as much or more
            offloaded = math.ceil(share * optimizer.optimizer_offload_fraction)
        elif optimizer.use_precision_aware_optimizer:
            moments = sum(DTYPE_BYTES[dtype] for dtype in optimizer.moment_dtype_settings.values())
        return StateBytes(
            parameters=(elements + self.frozen_elements[stage]) * (BF16 if self.is_bf16 else FP32),
            gradients=elements * FP32,
            master=(share - offloaded) * master,
            moments=(share - offloaded) * moments,
            counters=tensors * FP32 if is_adam and self.traits.adam_counters else 0,
            quantized=self.fp8_elements[stage] * self.traits.fp8_copy_bytes,
            host=offloaded * (master + moments + FP32),
        )


def _count_frozen_elements(recipe: Recipe, chunk: ModelChunk, traits: LayerTraits) -> int:
    """Return the number of elements of a chunk's weights without a gradient."""
    chunk_arguments = recipe.architecture, recipe.parallel, chunk, traits
    learning = {parameter.name for parameter in list_trained_parameters(*chunk_arguments, recipe.model)}
    return sum(
        parameter.elements
        for parameter in list_parameters(*chunk_arguments)
        if parameter.name not in learning
    )


def _count_fp8_gemm_elements(recipe: Recipe, chunk: ModelChunk, traits: LayerTraits) -> int:
    """Return the number of elements of a chunk's weights that FP8 products take; 0 without FP8."""
    if recipe.model.fp8 is None:
        return 0
    chunk_parameters = list_parameters(recipe.architecture, recipe.parallel, chunk, traits)
    return sum(
        parameter.elements for parameter in chunk_parameters if FP8_GEMM_WEIGHT_PATTERN.search(parameter.name)
    )


def _build_buffers(
    recipe: Recipe, layout: RankLayout, chunk: ModelChunk, traits: LayerTraits, code: MegatronCode
) -> tuple[ParameterBuffer, ParameterBuffer]:
    """Return the (dense, expert) buffers of one chunk; either may be empty."""
    parallel, ranks = recipe.parallel, layout.find_axis_size("dp") * layout.find_axis_size("cp")
    has_etp_groups = recipe.model.lora is not None or code.has(
        ETP_EXPERT_GROUPS_SOURCE_MARKER
    )  # adapters are marked by us
    has_expert_buffer = parallel.ep > 1 or (parallel.etp != parallel.tp and has_etp_groups)
    trained_parameters = list_trained_parameters(recipe.architecture, parallel, chunk, traits, recipe.model)
    experts = [p for p in trained_parameters if p.expert and has_expert_buffer]
    dense = [p for p in trained_parameters if not (p.expert and has_expert_buffer)]
    bucket = _choose_bucket_size(recipe, layout, chunk)
    is_divided = recipe.optimizer.use_distributed_optimizer
    return (
        ParameterBuffer.from_parameters(dense, ranks, bucket, is_divided=is_divided),
        ParameterBuffer.from_parameters(
            experts, layout.find_axis_size("expert-dp"), bucket, is_divided=is_divided
        ),
    )


def _choose_bucket_size(recipe: Recipe, layout: RankLayout, chunk: ModelChunk) -> int | None:
    """Return the number of elements of a bucket; None: one bucket.

    Only the first chunk of the first stage has several buckets, and only with overlap. Elsewhere the pipeline
    hides the reduction (DistributedDataParallel.__init__).
    """
    options = recipe.distributed
    if not options.overlap_grad_reduce or chunk.stage > 0 or chunk.index > 0:
        return None
    return options.bucket_size or max(40_000_000, 1_000_000 * layout.find_axis_size("dp"))


def is_shared_embedding_across_buckets(parameters: Sequence[LocalParameter], ranks: int) -> bool:
    """Return whether a defect of megatron-core puts the shared embedding across a boundary of buckets.

    The bucket in front is closed at a multiple of lcm(ranks, 128). The embedding still starts where the
    parameters ended, if that is a multiple of `ranks` (param_and_grad_buffer.py; mended in 0.13.0).
    """
    start = 0
    for parameter in reversed(parameters):
        start = _round_up(start, PARAMETER_START_MULTIPLE)
        if parameter.shared_embedding:
            return start % ranks == 0 and start % math.lcm(ranks, BUCKET_MULTIPLE) != 0
        start += parameter.elements
    return False


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
