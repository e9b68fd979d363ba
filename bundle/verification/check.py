"""The checks as data: the measurement, the number of ranks, and the results without and with a patch."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True)
class Raises:
    """An expected failure: an exception of this type or of a derived one, with `text` in its message."""

    type: str
    text: str


@dataclass(frozen=True, slots=True)
class Gap:
    """An expected failure: a distance from the reference of at least this much."""

    at_least: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One experiment, run once without the patch and once with it.

    `measurement` names a function, "package.module:function". It takes a Bench and returns the largest
    relative distance of a run from a reference that does not need the patch: unpacked, cp 1, all kept.
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
    """The observation of one rank: a distance, an exception, or why this machine cannot tell."""

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
    """The answer about one patch, with the observations as the reason."""

    patch: str
    status: Status
    reason: str

    def as_json(self) -> dict[str, Any]:
        """Return the fields as a plain mapping."""
        return {"id": self.patch, "status": str(self.status), "reason": self.reason}


def judge(patch: str, check: Check, without: Sequence[Observation], with_it: Sequence[Observation]) -> Result:
    """Return the result of a check from what its ranks saw without the patch and with it."""
    reasons = [
        observation.unprovable for observation in (*without, *with_it) if observation.unprovable is not None
    ]
    if reasons:
        return Result(patch, Status.NOT_PROVABLE, reasons[0])
    # One rank that fails as expected is enough: the others may only see that it is gone.
    expected = any(matches(failure, observation) for failure in check.without for observation in without)
    agrees = all(
        observation.gap is not None and observation.gap <= check.agreement for observation in with_it
    )
    reason = f"without it: {_format_observations(without)}; with it: {_format_observations(with_it)}"
    if expected and agrees:
        return Result(patch, Status.PROVEN, reason)
    expected_failures = " or ".join(_format_expected_failure(failure) for failure in check.without)
    wrong = [] if expected else [f"without it, expected {expected_failures}"]
    wrong += [] if agrees else [f"with it, expected a gap of at most {check.agreement:g}"]
    return Result(patch, Status.FAILED, f"{reason} ({'; '.join(wrong)})")


def matches(failure: Raises | Gap, observation: Observation) -> bool:
    """Return whether a rank saw this failure."""
    if isinstance(failure, Gap):
        # A run that became infinite or not a number has left the reference too.
        return observation.gap is not None and not observation.gap < failure.at_least
    return (
        observation.raised is not None
        and failure.type in observation.raised.split()
        and failure.text in observation.message
    )


def _format_observations(observations: Sequence[Observation]) -> str:
    return " | ".join(dict.fromkeys(map(str, observations)))


def _format_expected_failure(failure: Raises | Gap) -> str:
    if isinstance(failure, Gap):
        return f"a gap of at least {failure.at_least:g}"
    return f"{failure.type}: {failure.text}"


def build_check(measurement: str, *without: Raises | Gap, **rest: Any) -> Check:
    """Return the Check of one of our own measurements, "area:function"; `rest` as in Check."""
    return Check(measurement=f"bundle.verification.measurements.{measurement}", without=without, **rest)


CHECKS_BY_PATCH_ID: dict[str, Check] = {  # by the patch's id
    "mla-packed-qkv": build_check(
        "attention:measure_cp_packed_latent_attention",
        Raises("RuntimeError", "Sizes of tensors must match"),  # 0.12: a batch dimension of 1
        Raises("RuntimeError", "split_with_sizes expects"),  # 0.13: boundaries without padding
        world=2,
    ),
    "mla-thd-value-padding": build_check(
        "attention:measure_narrow_values",
        Raises("UsageError", "flash attention with thd input needs heads of equal size"),
        needs=("mla-packed-qkv",),
    ),
    "mla-uncompressed-query-norm": build_check(
        "attention:measure_uncompressed_query_projection",
        Raises("ValueError", "is non-trivial, but `q_lora_rank is None`"),  # megatron's local spec
        Raises("JobFailed", "fused a norm into a projection"),  # Transformer Engine's: a name of no other
    ),
    "mla-rotary-key-gradient": build_check(
        "attention:measure_mla_down_projection_gradients", Gap(1e-2), world=2
    ),
    "mla-query-norm-gradient": build_check(  # twice as large
        "attention:measure_mla_query_norm_gradient", Gap(0.5), world=2, needs=("mla-rotary-key-gradient",)
    ),
    "packed-rotary-host-reads": build_check(
        "attention:measure_cp_packed_rotary",
        Raises("RuntimeError", "meta"),
        Raises("NotImplementedError", "meta tensor"),
        world=2,
    ),
    "cuda-attention-host-reads": build_check(  # bf16
        "attention:measure_sync_free_pack_gap",
        Raises("RuntimeError", "synchronizing CUDA operation"),
        agreement=1e-2,
    ),
    "mtp-context-parallel-roll": build_check("mtp:measure_context_parallel", Gap(1e-2), world=2),
    "mtp-loss-context-parallel-count": build_check("mtp:measure_context_parallel", Gap(1e-2), world=2),
    "mtp-loss-context-parallel-normalisation": build_check(
        "mtp:measure_context_parallel", Gap(1e-2), world=2
    ),
    "mtp-packed-roll-boundaries": build_check("mtp:measure_padded_against_unpacked", Gap(1e-1)),
    "mtp-per-token-weight": build_check(  # one token of eight and more
        "mtp:measure_per_token_gradients", Gap(0.1), world=2, needs=("mtp-context-parallel-roll",)
    ),
    "mtp-zero-layers": build_check(
        "mtp:measure_zero_layers",
        Raises("AttributeError", "'NoneType' object has no attribute 'clone'"),
        agreement=0.0,
    ),
    "mtp-without-labels": build_check(
        "mtp:measure_logits_without_labels",
        Raises("AssertionError", "labels should not be None"),  # to 0.13
        Raises("AttributeError", "'NoneType' object has no attribute 'clone'"),  # to 0.16
        Gap(1.0),  # one run of the layers for nothing
        agreement=0.0,
    ),
    "mtp-labels-from-input": build_check(  # more weights have gradients than the layers have run
        "mtp:measure_logits_without_labels", Gap(5.0), agreement=0.0
    ),
    "mtp-packed-full-recompute": build_check(
        "mtp:measure_recompute",
        Raises("TypeError", "save_for_backward can only save variables"),
        agreement=0.0,
    ),
    "mtp-full-recompute": build_check(
        "mtp:measure_recompute",
        Raises("TypeError", "unexpected keyword argument 'padding_mask'"),
        agreement=0.0,
    ),
    "recompute-reclaim": build_check(  # layers whose input is still there
        "experts:count_unfreed_recompute_inputs", Gap(1.0), agreement=0.0
    ),
    "sort-of-sorted-tokens": build_check(  # two sorts, of the layer's input and output
        "experts:count_sorts_on_one_rank", Gap(2.0), agreement=1e-6
    ),
    "router-replay": build_check(
        "experts:measure_router_replay_mismatch", Gap(0.1), agreement=0.0
    ),  # of the tokens go elsewhere
    "router-replay-by-layer": build_check("experts:measure_router_replay_mismatch", Gap(0.1), agreement=0.0),
    "native-replay-recompute": build_check(
        "experts:measure_megatron_replay_recompute", Gap(1e-2), agreement=0.0
    ),
    "mla-without-te-linear": build_check(
        "gradients:measure_tp_mla_gradient_norm",
        Raises("TypeError", "isinstance() arg 2 must be a type"),  # to 0.16
        Raises("ValueError", "Unsupported linear_q_down_proj"),
        world=2,
        agreement=1e-4,
    ),
    "cpu-moe-splits-on-host": build_check(
        "experts:measure_ep_expert_gradients", Raises("TypeError", "all_to_all"), world=2
    ),
    "router-without-te-gemm": build_check(
        "experts:measure_fp32_router", Raises("NameError", "te_general_gemm")
    ),
    "optimizer-without-fp8-quantize": build_check(
        "gradients:measure_optimizer_norm_against_gradients",
        Raises("RuntimeError", "Invalid Transformer Engine version"),
    ),
    "per-token-loss-context-parallel": build_check(
        "gradients:measure_cp_gradient_norm", Gap(0.5), world=2
    ),  # twice as large
    "balancing-per-token-ranks": build_check(
        "experts:measure_per_token_balancing_gradient",
        Gap(1e-2),
        world=2,
        needs=("per-token-loss-context-parallel", "cuda-norm-of-expert-weights"),
    ),
    "balancing-mean-context-parallel": build_check(
        "experts:measure_cp_mean_balancing_gradient", Gap(1e-2), world=2
    ),
    "balancing-per-token-rows": build_check("experts:measure_sequence_aux_loss_gradient", Gap(1e-2)),
    "expert-bias-counts": build_check(
        "experts:measure_expert_counts", Gap(1e-4), agreement=0.0
    ),  # no odd number above 256
    "shared-embedding-bucket": build_check(
        "gradients:measure_shared_embedding_mark_effect",
        Raises("AssertionError", "each param only belongs to a single bucket"),
    ),
    "cuda-norm-of-whole-weights": build_check("gradients:measure_tp_mla_gradient_norm", Gap(1e-3), world=2),
    "cuda-norm-of-expert-weights": build_check("gradients:measure_tp_ep_gradient_norm", Gap(1e-3), world=2),
    "dist-checkpoint-serialization": build_check(
        "checkpoints:measure_round_trip",
        Raises("RuntimeError", "missing 1 required positional argument: 'serialization_format'"),
        agreement=0.0,
    ),
    "dist-checkpoint-numpy-product": build_check(
        "checkpoints:measure_parallel_write_round_trip",
        Raises("AttributeError", "module 'numpy' has no attribute 'product'"),
        world=2,
        agreement=0.0,
        needs=("dist-checkpoint-serialization",),
    ),
    "restricted-unpickle": build_check(
        "checkpoints:measure_checkpoint_code", Gap(1.0), agreement=0.0
    ),  # the code ran
    "offload-stale-weights": build_check(
        "gradients:measure_offload_late_weight_load", Gap(0.5), agreement=0.0
    ),
    "offload-resume-fp32": build_check(
        "gradients:measure_offload_adam_state_load", Raises("KeyError", "Parameter"), agreement=0.0
    ),
    "attention-sinks-norm": build_check("attention:measure_tp_sink_norm_gap", Gap(1e-2), world=2),
    "output-gate-of-shared-groups": build_check(
        "attention:measure_tp_gated_attention_gradients",
        Raises("RuntimeError", "is invalid for input of size"),
        world=2,
    ),
    "gated-delta-norm-gradient": build_check("attention:measure_delta_net_norm_gradient", Gap(0.1), world=2),
    "cross-attention-groups": build_check(  # twice as many
        "attention:measure_cross_attention_row_counts", Gap(1.0), world=2, agreement=0.0
    ),
    "mrope-packed": build_check(
        "mtp:measure_dense_cp_packed_mrope",
        Gap(1e-2),
        Raises("RuntimeError", "is invalid for input of size"),  # 0.12 cuts another dimension
        world=2,
    ),
    "mtp-whole-embeddings": build_check(
        "mtp:measure_unsharded_embeddings", Raises("RuntimeError", "Sizes of tensors must match"), world=2
    ),
    "optimizer-checkpoint-default": build_check(
        "checkpoints:measure_default_optimizer_format",
        Raises("CheckpointingException", "flattened_range is not supported"),
        agreement=0.0,
    ),
    "dp-reshardable-steps": build_check(
        "checkpoints:measure_dp_reshardable_optimizer_state", Gap(0.5), agreement=0.0
    ),  # one step of three
    "optimizer-gather-memory": build_check(
        "checkpoints:measure_device_optimizer_gather", Gap(1.0), agreement=0.0, world=2
    ),
    "padding-mask-expert-bias": build_check(
        "experts:measure_masked_expert_counts",
        Raises("RuntimeError", "must match the size of tensor"),
        agreement=0.0,
    ),
    "padding-mask-own-count": build_check(
        "experts:measure_unpadded_mask_balancing_gradient", Gap(0.5), world=2
    ),  # twice as large
    "global-aux-loss-tokens": build_check("experts:measure_aux_gradient_against_formula", Gap(1e-2)),
    "frozen-weight-product": build_check("gradients:measure_frozen_head_input_gradient", Gap(1.0)),
    "label-smoothing-over-ranks": build_check("gradients:measure_label_smoothing", Gap(1e-2), world=2),
    "loss-of-gathered-logits": build_check("gradients:measure_gathered_logits", Gap(1e-2), world=2),
}
