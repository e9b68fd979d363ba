"""The checks as data: what is measured, on how many ranks, and what it must say without and with a patch."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True)
class Raises:
    """An expected failure: an exception of this type, or derived from it, whose message holds `text`."""

    type: str
    text: str


@dataclass(frozen=True, slots=True)
class Gap:
    """An expected failure: a distance from the reference of at least this much."""

    at_least: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One experiment, run once without the patch and once with it.

    `measurement` names a function, "package.module:function", that takes a Bench and returns the largest
    relative distance of a run from a reference which does not need the patch: unpacked, cp 1, all kept.
    """

    measurement: str
    world: int = 1  # ranks
    seconds: float = 60  # each of the two runs may take
    without: tuple[Raises | Gap, ...]  # any of these; releases differ in how they fail
    agreement: float = 1e-5  # the largest distance with the patch
    needs: tuple[str, ...] = ()  # patches without which the experiment does not get to the point


class Status(StrEnum):
    """The three answers of a check."""

    PROVEN = "proven"
    NOT_PROVABLE = "not provable here"
    FAILED = "failed"


class NotProvable(Exception):
    """This machine or this release cannot show the defect; the message says why."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What one rank saw: a distance, an exception, or why this machine cannot tell."""

    gap: float | None = None
    raised: str | None = None  # the exception's types, its own first: "UsageError BundleError Exception"
    message: str = ""
    unprovable: str | None = None

    def __str__(self) -> str:
        if self.unprovable is not None:
            return self.unprovable
        return f"gap {self.gap:.1e}" if self.raised is None else f"{self.raised.split()[0]}: {self.message}"


@dataclass(frozen=True, slots=True)
class Result:
    """The answer about one patch, with what was seen as the reason."""

    patch: str
    status: Status
    reason: str

    def as_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return {"id": self.patch, "status": str(self.status), "reason": self.reason}


def judge(patch: str, check: Check, without: Sequence[Observation], with_it: Sequence[Observation]) -> Result:
    """The result of a check from what its ranks saw in the run without the patch and in the one with it."""
    reasons = [seen.unprovable for seen in (*without, *with_it) if seen.unprovable is not None]
    if reasons:
        return Result(patch, Status.NOT_PROVABLE, reasons[0])
    # One rank that fails as expected is enough: the others may only see that it is gone.
    expected = any(matches(failure, seen) for failure in check.without for seen in without)
    agrees = all(seen.gap is not None and seen.gap <= check.agreement for seen in with_it)
    reason = f"without it: {_shown(without)}; with it: {_shown(with_it)}"
    if expected and agrees:
        return Result(patch, Status.PROVEN, reason)
    wanted = " or ".join(_described(failure) for failure in check.without)
    wrong = [] if expected else [f"without it there should be {wanted}"]
    wrong += [] if agrees else [f"with it the gap should be at most {check.agreement:g}"]
    return Result(patch, Status.FAILED, f"{reason} ({'; '.join(wrong)})")


def matches(failure: Raises | Gap, seen: Observation) -> bool:
    """Whether a rank saw this failure."""
    if isinstance(failure, Gap):
        # A run that became infinite or not a number has left the reference too.
        return seen.gap is not None and not seen.gap < failure.at_least
    return seen.raised is not None and failure.type in seen.raised.split() and failure.text in seen.message


def _shown(seen: Sequence[Observation]) -> str:
    return " | ".join(dict.fromkeys(map(str, seen)))


def _described(failure: Raises | Gap) -> str:
    if isinstance(failure, Gap):
        return f"a gap of at least {failure.at_least:g}"
    return f"{failure.type}: {failure.text}"


def measured(by: str, *without: Raises | Gap, **rest: Any) -> Check:
    """The Check by an "area:function" of our own measurements; `rest` as in Check."""
    return Check(measurement=f"bundle.verification.measurements.{by}", without=without, **rest)


CHECKS: dict[str, Check] = {  # by the patch's id
    "mla-packed-qkv": measured(
        "attention:packed_over_ranks",
        Raises("RuntimeError", "Sizes of tensors must match"),  # 0.12: a batch dimension of 1
        Raises("RuntimeError", "split_with_sizes expects"),  # 0.13: boundaries without padding
        world=2,
    ),
    "mla-thd-value-padding": measured(
        "attention:narrow_values",
        Raises("UsageError", "flash attention wants thd heads of one size"),
        needs=("mla-packed-qkv",),
    ),
    "mla-uncompressed-query-norm": measured(
        "attention:uncompressed_queries",
        Raises("ValueError", "is non-trivial, but `q_lora_rank is None`"),  # megatron's local spec
        Raises("JobFailed", "folded a norm into a projection"),  # Transformer Engine's: a name of no other
    ),
    "mla-rotary-key-gradient": measured("attention:rotary_key", Gap(1e-2), world=2),
    "mla-query-norm-gradient": measured(  # twice as large
        "attention:query_norm", Gap(0.5), world=2, needs=("mla-rotary-key-gradient",)
    ),
    "packed-rotary-host-reads": measured(
        "attention:rotary_positions",
        Raises("RuntimeError", "meta"),
        Raises("NotImplementedError", "meta tensor"),
        world=2,
    ),
    "cuda-attention-host-reads": measured(  # bf16
        "attention:host_reads", Raises("RuntimeError", "synchronizing CUDA operation"), agreement=1e-2
    ),
    "mtp-context-parallel-roll": measured("mtp:context_parallel", Gap(1e-2), world=2),
    "mtp-loss-context-parallel-count": measured("mtp:context_parallel", Gap(1e-2), world=2),
    "mtp-loss-context-parallel-normalisation": measured("mtp:context_parallel", Gap(1e-2), world=2),
    "mtp-packed-roll-boundaries": measured("mtp:padded_packing", Gap(1e-1)),
    "mtp-per-token-weight": measured(  # one token of eight and more
        "mtp:per_token", Gap(0.1), world=2, needs=("mtp-context-parallel-roll",)
    ),
    "mtp-zero-layers": measured(
        "mtp:zero_layers",
        Raises("AttributeError", "'NoneType' object has no attribute 'clone'"),
        agreement=0.0,
    ),
    "mtp-without-labels": measured(
        "mtp:without_labels",
        Raises("AssertionError", "labels should not be None"),  # to 0.13
        Raises("AttributeError", "'NoneType' object has no attribute 'clone'"),  # to 0.16
        Gap(1.0),  # one run of the layers for nothing
        agreement=0.0,
    ),
    "mtp-labels-from-input": measured(  # more weights have gradients than the layers have run
        "mtp:without_labels", Gap(5.0), agreement=0.0
    ),
    "mtp-packed-full-recompute": measured(
        "mtp:recomputed",
        Raises("TypeError", "save_for_backward can only save variables"),
        agreement=0.0,
    ),
    "mtp-full-recompute": measured(
        "mtp:recomputed",
        Raises("TypeError", "unexpected keyword argument 'padding_mask'"),
        agreement=0.0,
    ),
    "recompute-reclaim": measured(  # layers whose input is still there
        "experts:inputs_alive", Gap(1.0), agreement=0.0
    ),
    "router-replay": measured("experts:replay", Gap(0.1), agreement=0.0),  # of the tokens go elsewhere
    "router-replay-by-layer": measured("experts:replay", Gap(0.1), agreement=0.0),
    "native-replay-recompute": measured("experts:native_recompute", Gap(1e-2), agreement=0.0),
    "mla-without-te-linear": measured(
        "gradients:latent_attention",
        Raises("TypeError", "isinstance() arg 2 must be a type"),  # to 0.16
        Raises("ValueError", "Unsupported linear_q_down_proj"),
        world=2,
        agreement=1e-4,
    ),
    "cpu-moe-splits-on-host": measured("experts:over_ranks", Raises("TypeError", "all_to_all"), world=2),
    "router-without-te-gemm": measured("experts:router_in_fp32", Raises("NameError", "te_general_gemm")),
    "optimizer-without-fp8-quantize": measured(
        "gradients:optimizer_step", Raises("RuntimeError", "Invalid Transformer Engine version")
    ),
    "per-token-loss-context-parallel": measured("gradients:per_token", Gap(0.5), world=2),  # twice as large
    "balancing-per-token-ranks": measured(
        "experts:per_token",
        Gap(1e-2),
        world=2,
        needs=("per-token-loss-context-parallel", "cuda-norm-of-expert-weights"),
    ),
    "balancing-mean-context-parallel": measured("experts:mean", Gap(1e-2), world=2),
    "balancing-per-token-rows": measured("experts:sequences", Gap(1e-2)),
    "expert-bias-counts": measured("experts:counts", Gap(1e-4), agreement=0.0),  # no odd number above 256
    "shared-embedding-bucket": measured(
        "gradients:shared_embedding", Raises("AssertionError", "each param only belongs to a single bucket")
    ),
    "cuda-norm-of-whole-weights": measured("gradients:latent_attention", Gap(1e-3), world=2),
    "cuda-norm-of-expert-weights": measured("gradients:experts", Gap(1e-3), world=2),
    "dist-checkpoint-serialization": measured(
        "checkpoints:round_trip",
        Raises("RuntimeError", "missing 1 required positional argument: 'serialization_format'"),
        agreement=0.0,
    ),
    "dist-checkpoint-numpy-product": measured(
        "checkpoints:shared_round_trip",
        Raises("AttributeError", "module 'numpy' has no attribute 'product'"),
        world=2,
        agreement=0.0,
        needs=("dist-checkpoint-serialization",),
    ),
    "restricted-unpickle": measured(
        "checkpoints:code_in_common_state", Gap(1.0), agreement=0.0
    ),  # the code ran
    "offload-stale-weights": measured("gradients:loaded_weights", Gap(0.5), agreement=0.0),
    "offload-resume-fp32": measured("gradients:loaded_state", Raises("KeyError", "Parameter"), agreement=0.0),
    "attention-sinks-norm": measured("attention:sinks", Gap(1e-2), world=2),
    "output-gate-of-shared-groups": measured(
        "attention:gated_output", Raises("RuntimeError", "is invalid for input of size"), world=2
    ),
    "gated-delta-norm-gradient": measured("attention:output_norm", Gap(0.1), world=2),
    "cross-attention-groups": measured(  # twice as many
        "attention:given_ranks", Gap(1.0), world=2, agreement=0.0
    ),
    "mrope-packed": measured(
        "mtp:packed_positions",
        Gap(1e-2),
        Raises("RuntimeError", "is invalid for input of size"),  # 0.12 cuts another dimension
        world=2,
    ),
    "mtp-whole-embeddings": measured(
        "mtp:whole_embeddings", Raises("RuntimeError", "Sizes of tensors must match"), world=2
    ),
    "optimizer-checkpoint-default": measured(
        "checkpoints:default_form",
        Raises("CheckpointingException", "flattened_range is not supported"),
        agreement=0.0,
    ),
    "dp-reshardable-steps": measured("checkpoints:steps", Gap(0.5), agreement=0.0),  # one step of three
    "padding-mask-expert-bias": measured(
        "experts:expert_bias", Raises("RuntimeError", "must match the size of tensor"), agreement=0.0
    ),
    "padding-mask-own-count": measured("experts:own_count", Gap(0.5), world=2),  # twice as large
    "global-aux-loss-tokens": measured("experts:global_loss", Gap(1e-2)),
    "frozen-weight-product": measured("gradients:frozen_product", Gap(1.0)),
    "label-smoothing-over-ranks": measured("gradients:label_smoothing", Gap(1e-2), world=2),
    "loss-of-gathered-logits": measured("gradients:gathered_logits", Gap(1e-2), world=2),
}
