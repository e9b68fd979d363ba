"""The memory estimate: bytes of weights, gradients and optimizer state on every rank, as megatron-core
allocates them, and with the activations beside them whether a device has as much.

Megatron's data-parallel wrapper lays parameters in one contiguous buffer and gradients in another, both
whole on every data-parallel rank; the distributed optimizer divides the rest: with bf16 an fp32 copy of the
weights, and Adam's two moments in fp32 (DistributedOptimizer._build_model_and_main_param_groups). Without it
every rank has all of that, and nothing is padded. A precision-aware one keeps what the recipe says; what is
offloaded is on the host, where its gradient is copied to as well (HybridDeviceOptimizer).

A buffer with it: parameters go in from the last to the first, each at a multiple of 64 elements; a bucket
ends at a multiple of lcm(ranks, 128), so that every rank's part is equal and aligned
(_ParamAndGradBuffer.__init__ in 0.12 to 0.17, DistributedOptimizer._compute_per_buffer_param_layout from
0.18).
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, Self

from bundle.capabilities import LayerTraits
from bundle.environment.machine import Fact
from bundle.environment.packages import MegatronCode, SourcePredicate
from bundle.errors import bytes_shown
from bundle.planning.activations import ActivationBytes, activations
from bundle.planning.layout import Chunk, RankLayout
from bundle.planning.size import BF16, FP32, MULTIPLIED, Parameter, parameters, trained
from bundle.recipe import Recipe
from bundle.recipe.sections import Optimizer

_BYTES = {"fp32": FP32, "bf16": BF16}
# Experts whose tensor parallel size is not the dense one get the experts' groups even at ep 1; before, their
# gradients are reduced like dense ones.
EXPERT_GROUPS_BY_ETP = SourcePredicate("tensor_parallel/layers.py", "use_expert_pgs", "0.19")
PARAMETER_MULTIPLE = 64
BUCKET_MULTIPLE = 128
# What a plan does not count: the device's context, communication buffers, workspaces and fragmentation.
HEADROOM = 0.1
# The largest micro-batch with experts that was measured on an H200: 8 rows of 4,096 tokens.
MOST_TOKENS = 32768


class StateBytes(NamedTuple):
    """Bytes of one rank. `moments` of any optimizer; `counters` are the step counts of torch's own Adam;
    `quantized` the copies that FP8 products keep of their weights.

    `host` is what an offloaded optimizer has there; all else is on the device.
    """

    parameters: int = 0
    gradients: int = 0
    master: int = 0
    moments: int = 0
    counters: int = 0
    quantized: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """All that is on the device."""
        return sum(self) - self.host


class MemoryEstimate(NamedTuple):
    """Bytes of the rank of a pipeline stage that needs most."""

    stage: int
    states: StateBytes
    activations: ActivationBytes

    @property
    def total(self) -> int:
        """Bytes at the worst moment of a step."""
        return self.states.total + self.activations.total


def estimates(
    recipe: Recipe, layout: RankLayout, traits: LayerTraits, code: MegatronCode
) -> tuple[MemoryEstimate, ...]:
    """The estimate of every pipeline stage."""
    buffers = StateBuffers.of(recipe, layout, traits, code)
    return tuple(
        MemoryEstimate(
            stage=stage,
            states=buffers.largest(stage),
            activations=activations(recipe, layout, stage, traits, code),
        )
        for stage in range(len(layout.stages))
    )


def memory_note(stages: Sequence[MemoryEstimate], device: Fact[int]) -> str | None:
    """A warning where the job fits by numbers but leaves little for what is not counted."""
    worst = max((estimate.total for estimate in stages), default=0)
    if device.value is None or not device.value * (1 - HEADROOM) < worst <= device.value:
        return None
    return (
        f"memory is tight: {bytes_shown(worst)} of {bytes_shown(device.value)}, and the device's context, "
        "communication buffers and fragmentation are not counted"
    )


def advise_micro_batch_size(
    recipe: Recipe, layout: RankLayout, traits: LayerTraits, code: MegatronCode, device: Fact[int]
) -> str | None:
    """Return a note that names the micro-batch of 2, 4 .. times the size that fits, for a model with experts.

    The products of experts are small, and there are as many for a small micro-batch as for a large one. A
    pipeline keeps its size, because fewer micro-batches leave its stages idle for longer.
    """
    train, dp = recipe.train, layout.size("dp")
    if recipe.architecture.moe is None or device.value is None:
        return None
    if recipe.data.packed or layout.size("pp") > 1:
        return None
    size, note = 2 * train.micro_batch_size, None
    while train.global_batch_size % (size * dp) == 0 and size * recipe.data.sequence_length <= MOST_TOKENS:
        larger = train.model_copy(update={"micro_batch_size": size})
        stages = estimates(recipe.model_copy(update={"train": larger}), layout, traits, code)
        needed = max(stage.total for stage in stages)
        if needed > device.value * (1 - HEADROOM):
            break
        note = (
            f"train.micro_batch_size: {size} fits as well ({bytes_shown(needed)} of"
            f" {bytes_shown(device.value)}) and is faster than {train.micro_batch_size} with experts"
        )
        size *= 2
    return note


class Span(NamedTuple):
    """The elements [start, end) of a buffer that hold one parameter."""

    parameter: Parameter
    start: int
    end: int


class Buffer(NamedTuple):
    """One buffer of one model chunk, whose every bucket is divided equally between `ranks` data-parallel
    ranks.
    """

    ranks: int
    spans: tuple[Span, ...]
    buckets: tuple[tuple[int, int], ...]  # [start, end) of each

    @classmethod
    def of(
        cls,
        parameters: Sequence[Parameter],
        ranks: int,
        bucket_size: int | None = None,
        *,
        divided: bool = True,
    ) -> Self:
        """The buffer of these parameters (in registration order); `bucket_size` None: all in one bucket.

        A bucket closes once it holds `bucket_size` elements. An embedding that two stages share has a bucket
        of its own. Only what is `divided` between ranks is padded.
        """
        multiple, start_multiple = (
            (math.lcm(ranks, BUCKET_MULTIPLE), PARAMETER_MULTIPLE) if divided else (1, 1)
        )
        spans: list[Span] = []
        buckets: list[tuple[int, int]] = []
        start = opened = 0

        def close(end: int) -> int:
            buckets.append((opened, _up(end, multiple)))
            return buckets[-1][1]

        for parameter in reversed(parameters):
            start = _up(start, start_multiple)
            if parameter.shared_embedding and start > opened:
                start = opened = close(start)
            end = start + parameter.elements
            spans.append(Span(parameter, start, end))
            full = bucket_size is not None and end - opened >= bucket_size
            start = end
            if full or parameter.shared_embedding:
                start = opened = close(end)
        if start > opened:
            close(start)
        return cls(ranks, tuple(spans), tuple(buckets))

    @property
    def elements(self) -> int:
        """The size of the buffer, padding included."""
        return self.buckets[-1][1] if self.buckets else 0

    def changes(self) -> Iterator[tuple[int, int, int]]:
        """What a rank keeps optimizer state for beyond the rank before it: (rank, elements, tensors).

        Nothing is counted rank by rank: between the ends of a tensor all keep alike, however many they are.
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
    """The buffers of every stage, from which any rank's bytes follow."""

    layout: RankLayout
    stages: tuple[tuple[tuple[Buffer, Buffer], ...], ...]  # stage, chunk, (dense, expert)
    bf16: bool
    optimizer: Optimizer
    traits: LayerTraits
    frozen: tuple[int, ...]  # weights beside the buffers of every stage, which stay as they are
    multiplied: tuple[int, ...]  # weights of every stage's FP8 products

    @classmethod
    def of(cls, recipe: Recipe, layout: RankLayout, traits: LayerTraits, code: MegatronCode) -> Self:
        """The buffers of a recipe on this code of megatron-core, with a backend's layers."""
        stages = tuple(
            tuple(_buffers(recipe, layout, chunk, traits, code) for chunk in chunks)
            for chunks in layout.stages
        )
        frozen, multiplied = (
            tuple(sum(of(recipe, chunk, traits) for chunk in chunks) for chunks in layout.stages)
            for of in (_frozen, _multiplied)
        )
        return cls(layout, stages, recipe.model.dtype == "bf16", recipe.optimizer, traits, frozen, multiplied)

    def rank(self, rank: int) -> StateBytes:
        """The bytes of one rank."""
        pp = self.layout.axis("pp")
        stage, inside = pp.index(rank), rank % pp.stride
        *_, kept = (kept for first, *kept in self._steps(stage) if first <= inside)
        return self._states(stage, *kept)

    def largest(self, stage: int) -> StateBytes:
        """The bytes of the rank of a stage that needs most: the padding falls on the others."""
        every = (self._states(stage, *kept) for _, *kept in self._steps(stage))
        return max(every, key=lambda states: states.total)

    def _elements(self, stage: int) -> int:
        """The sizes of a stage's buffers together, padding included."""
        return sum(buffer.elements for buffers in self.stages[stage] for buffer in buffers)

    def _steps(self, stage: int) -> list[tuple[int, int, int]]:
        """(rank, elements, tensors) that ranks of a stage keep optimizer state for, from that rank on."""
        if not self.optimizer.use_distributed_optimizer:
            spans = [span for buffers in self.stages[stage] for buffer in buffers for span in buffer.spans]
            return [(0, sum(span.parameter.elements for span in spans), len(spans))]
        # Ranks that differ in tp alone keep the same share of dense buffers; of experts', in etp or ep.
        strides = self.layout.axis("cp").stride, self.layout.axis("expert-dp").stride
        changes = {0: (0, 0)}
        for buffers in self.stages[stage]:
            for buffer, stride in zip(buffers, strides, strict=True):
                for share, elements, tensors in buffer.changes():
                    before = changes.get(share * stride, (0, 0))
                    changes[share * stride] = before[0] + elements, before[1] + tensors
        kept = accumulate(
            (changes[rank] for rank in sorted(changes)), lambda a, b: (a[0] + b[0], a[1] + b[1])
        )
        there = self.layout.axis("pp").stride
        return [(rank, *sizes) for rank, sizes in zip(sorted(changes), kept, strict=True) if rank < there]

    def _states(self, stage: int, own: int, tensors: int) -> StateBytes:
        elements, optimizer = self._elements(stage), self.optimizer
        adam, states = optimizer.name == "adam", len(optimizer.states)
        master, moments = FP32 if self.bf16 else 0, states * FP32
        offloaded = 0
        if optimizer.optimizer_cpu_offload:  # whole tensors of a rank's share, until it is as much or more
            offloaded = math.ceil(own * optimizer.optimizer_offload_fraction)
        elif optimizer.use_precision_aware_optimizer:
            moments = sum(_BYTES[of] for of in optimizer.types.values())
        return StateBytes(
            parameters=(elements + self.frozen[stage]) * (BF16 if self.bf16 else FP32),
            gradients=elements * FP32,
            master=(own - offloaded) * master,
            moments=(own - offloaded) * moments,
            counters=tensors * FP32 if adam and self.traits.adam_counters else 0,
            quantized=self.multiplied[stage] * self.traits.fp8_copies,
            host=offloaded * (master + moments + FP32),
        )


def _frozen(recipe: Recipe, chunk: Chunk, traits: LayerTraits) -> int:
    """The elements of a chunk's weights that have no gradient."""
    of_chunk = recipe.architecture, recipe.parallel, chunk, traits
    learning = {of.name for of in trained(*of_chunk, recipe.model)}
    return sum(of.elements for of in parameters(*of_chunk) if of.name not in learning)


def _multiplied(recipe: Recipe, chunk: Chunk, traits: LayerTraits) -> int:
    """The elements of a chunk's weights that FP8 products take; 0 without any."""
    if recipe.model.fp8 is None:
        return 0
    of_chunk = parameters(recipe.architecture, recipe.parallel, chunk, traits)
    return sum(of.elements for of in of_chunk if MULTIPLIED.search(of.name))


def _buffers(
    recipe: Recipe, layout: RankLayout, chunk: Chunk, traits: LayerTraits, code: MegatronCode
) -> tuple[Buffer, Buffer]:
    """(dense, expert) buffers of one chunk; either may be empty."""
    parallel, ranks = recipe.parallel, layout.size("dp") * layout.size("cp")
    by_etp = recipe.model.lora is not None or code.has(EXPERT_GROUPS_BY_ETP)  # adapters are marked by us
    apart = parallel.ep > 1 or (parallel.etp != parallel.tp and by_etp)
    all_of_them = trained(recipe.architecture, parallel, chunk, traits, recipe.model)
    experts = [p for p in all_of_them if p.expert and apart]
    dense = [p for p in all_of_them if not (p.expert and apart)]
    bucket = _bucket_size(recipe, layout, chunk)
    divided = recipe.optimizer.use_distributed_optimizer
    return (
        Buffer.of(dense, ranks, bucket, divided=divided),
        Buffer.of(experts, layout.size("expert-dp"), bucket, divided=divided),
    )


def _bucket_size(recipe: Recipe, layout: RankLayout, chunk: Chunk) -> int | None:
    """Elements of a bucket: only the first chunk of the first stage has several, and only with overlap.

    Elsewhere the pipeline hides the reduction anyway (DistributedDataParallel.__init__).
    """
    options = recipe.distributed
    if not options.overlap_grad_reduce or chunk.stage > 0 or chunk.index > 0:
        return None
    return options.bucket_size or max(40_000_000, 1_000_000 * layout.size("dp"))


def splits_shared_embedding(parameters: Sequence[Parameter], ranks: int) -> bool:
    """Whether megatron-core with that defect lays the shared embedding across a boundary of buckets.

    There the bucket in front is closed at a multiple of lcm(ranks, 128), but the embedding still starts where
    the parameters ended, if that is a multiple of `ranks` (param_and_grad_buffer.py; mended in 0.13.0).
    """
    start = 0
    for parameter in reversed(parameters):
        start = _up(start, PARAMETER_MULTIPLE)
        if parameter.shared_embedding:
            return start % ranks == 0 and start % math.lcm(ranks, BUCKET_MULTIPLE) != 0
        start += parameter.elements
    return False


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
