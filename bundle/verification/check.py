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

    patch: str  # its id
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


_MEASURED = "bundle.verification.measurements"
_CHECKS = (
    Check(
        patch="mla-packed-qkv",
        measurement=f"{_MEASURED}.attention:packed_over_ranks",
        world=2,
        without=(
            Raises("RuntimeError", "Sizes of tensors must match"),  # 0.12: a batch dimension of 1
            Raises("RuntimeError", "split_with_sizes expects"),  # 0.13: boundaries without padding
        ),
    ),
    Check(
        patch="mla-thd-value-padding",
        measurement=f"{_MEASURED}.attention:narrow_values",
        without=(Raises("UsageError", "flash attention wants thd heads of one size"),),
        needs=("mla-packed-qkv",),
    ),
    Check(
        patch="mla-uncompressed-query-norm",
        measurement=f"{_MEASURED}.attention:uncompressed_queries",
        without=(
            Raises("ValueError", "is non-trivial, but `q_lora_rank is None`"),  # megatron's local spec
            Raises(
                "JobFailed", "folded a norm into a projection"
            ),  # Transformer Engine's: a name of no other
        ),
    ),
    Check(
        patch="mla-rotary-key-gradient",
        measurement=f"{_MEASURED}.attention:rotary_key",
        world=2,
        without=(Gap(1e-2),),
    ),
    Check(
        patch="mla-query-norm-gradient",
        measurement=f"{_MEASURED}.attention:query_norm",
        world=2,
        without=(Gap(0.5),),  # twice as large
        needs=("mla-rotary-key-gradient",),
    ),
    Check(
        patch="packed-rotary-host-reads",
        measurement=f"{_MEASURED}.packed:rotary_positions",
        world=2,
        without=(Raises("RuntimeError", "meta"), Raises("NotImplementedError", "meta tensor")),
    ),
    Check(
        patch="cuda-attention-host-reads",
        measurement=f"{_MEASURED}.packed:attention",
        without=(Raises("RuntimeError", "synchronizing CUDA operation"),),
        agreement=1e-2,  # bf16
    ),
    Check(
        patch="mtp-context-parallel-roll",
        measurement=f"{_MEASURED}.mtp:context_parallel",
        world=2,
        without=(Gap(1e-2),),
    ),
    Check(
        patch="mtp-loss-context-parallel-count",
        measurement=f"{_MEASURED}.mtp:context_parallel",
        world=2,
        without=(Gap(1e-2),),
    ),
    Check(
        patch="mtp-loss-context-parallel-normalisation",
        measurement=f"{_MEASURED}.mtp:context_parallel",
        world=2,
        without=(Gap(1e-2),),
    ),
    Check(
        patch="mtp-packed-roll-boundaries",
        measurement=f"{_MEASURED}.mtp:padded_packing",
        without=(Gap(1e-1),),
    ),
    Check(
        patch="mtp-per-token-weight",
        measurement=f"{_MEASURED}.mtp:per_token",
        world=2,
        without=(Gap(0.1),),  # one token of eight and more
        needs=("mtp-context-parallel-roll",),
    ),
    Check(
        patch="mtp-zero-layers",
        measurement=f"{_MEASURED}.mtp:zero_layers",
        without=(Raises("AttributeError", "'NoneType' object has no attribute 'clone'"),),
        agreement=0.0,
    ),
    Check(
        patch="mtp-without-labels",
        measurement=f"{_MEASURED}.mtp:without_labels",
        without=(
            Raises("AssertionError", "labels should not be None"),  # to 0.13
            Raises("AttributeError", "'NoneType' object has no attribute 'clone'"),  # to 0.16
            Gap(1.0),  # one run of the layers for nothing, from 0.19 with gradients
        ),
        agreement=0.0,
    ),
    Check(
        patch="mtp-packed-full-recompute",
        measurement=f"{_MEASURED}.packed:prediction_layers",
        without=(Raises("TypeError", "save_for_backward can only save variables"),),
        agreement=0.0,
    ),
    Check(
        patch="mtp-full-recompute",
        measurement=f"{_MEASURED}.packed:prediction_layers",
        without=(Raises("TypeError", "unexpected keyword argument 'padding_mask'"),),
        agreement=0.0,
    ),
    Check(
        patch="recompute-reclaim",
        measurement=f"{_MEASURED}.packed:inputs_alive",
        without=(Gap(1.0),),  # layers whose input is still there
        agreement=0.0,
    ),
    Check(
        patch="router-replay",
        measurement=f"{_MEASURED}.experts:replay",
        without=(Gap(0.1),),  # of the tokens go elsewhere
        agreement=0.0,
    ),
    Check(
        patch="router-replay-by-layer",
        measurement=f"{_MEASURED}.experts:replay",
        without=(Gap(0.1),),
        agreement=0.0,
    ),
    Check(
        patch="native-replay-recompute",
        measurement=f"{_MEASURED}.experts:native_recompute",
        without=(Gap(1e-2),),
        agreement=0.0,
    ),
    Check(
        patch="cpu-mla-without-te-linear",
        measurement=f"{_MEASURED}.gradients:latent_attention",
        world=2,
        without=(
            Raises("TypeError", "isinstance() arg 2 must be a type"),  # to 0.16
            Raises("ValueError", "Unsupported linear_q_down_proj"),
        ),
        agreement=1e-4,
    ),
    Check(
        patch="cpu-moe-splits-on-host",
        measurement=f"{_MEASURED}.cpu:experts_over_ranks",
        world=2,
        without=(Raises("TypeError", "all_to_all"),),
    ),
    Check(
        patch="cpu-router-without-te-gemm",
        measurement=f"{_MEASURED}.cpu:router_in_fp32",
        without=(Raises("NameError", "te_general_gemm"),),
    ),
    Check(
        patch="cpu-optimizer-without-fp8-quantize",
        measurement=f"{_MEASURED}.cpu:optimizer_step",
        without=(Raises("RuntimeError", "Invalid Transformer Engine version"),),
    ),
    Check(
        patch="per-token-loss-context-parallel",
        measurement=f"{_MEASURED}.gradients:per_token",
        world=2,
        without=(Gap(0.5),),  # twice as large
    ),
    Check(
        patch="balancing-per-token-ranks",
        measurement=f"{_MEASURED}.experts:per_token",
        world=2,
        without=(Gap(1e-2),),
        needs=("per-token-loss-context-parallel", "cuda-norm-of-expert-weights"),
    ),
    Check(
        patch="balancing-mean-context-parallel",
        measurement=f"{_MEASURED}.experts:mean",
        world=2,
        without=(Gap(1e-2),),
    ),
    Check(
        patch="balancing-per-token-rows",
        measurement=f"{_MEASURED}.experts:sequences",
        without=(Gap(1e-2),),
    ),
    Check(
        patch="expert-bias-counts",
        measurement=f"{_MEASURED}.experts:counts",
        without=(Gap(1e-4),),  # no odd number above 256
        agreement=0.0,
    ),
    Check(
        patch="shared-embedding-bucket",
        measurement=f"{_MEASURED}.gradients:shared_embedding",
        without=(Raises("AssertionError", "each param only belongs to a single bucket"),),
    ),
    Check(
        patch="cuda-norm-of-whole-weights",
        measurement=f"{_MEASURED}.gradients:latent_attention",
        world=2,
        without=(Gap(1e-3),),
        agreement=1e-5,
    ),
    Check(
        patch="cuda-norm-of-expert-weights",
        measurement=f"{_MEASURED}.gradients:experts",
        world=2,
        without=(Gap(1e-3),),
        agreement=1e-5,
    ),
    Check(
        patch="dist-checkpoint-serialization",
        measurement=f"{_MEASURED}.checkpoints:round_trip",
        without=(Raises("RuntimeError", "missing 1 required positional argument: 'serialization_format'"),),
        agreement=0.0,
    ),
    Check(
        patch="dist-checkpoint-numpy-product",
        measurement=f"{_MEASURED}.checkpoints:shared_round_trip",
        world=2,
        without=(Raises("AttributeError", "module 'numpy' has no attribute 'product'"),),
        agreement=0.0,
        needs=("dist-checkpoint-serialization",),
    ),
    Check(
        patch="restricted-unpickle",
        measurement=f"{_MEASURED}.checkpoints:code_in_common_state",
        without=(Gap(1.0),),  # the code ran
        agreement=0.0,
    ),
    Check(
        patch="offload-stale-weights",
        measurement=f"{_MEASURED}.gradients:loaded_weights",
        without=(Gap(0.5),),
        agreement=0.0,
    ),
    Check(
        patch="offload-resume-fp32",
        measurement=f"{_MEASURED}.gradients:loaded_state",
        without=(Raises("KeyError", "Parameter"),),
        agreement=0.0,
    ),
    Check(
        patch="attention-sinks-norm",
        measurement=f"{_MEASURED}.attention:sinks",
        world=2,
        without=(Gap(1e-2),),
    ),
    Check(
        patch="output-gate-of-shared-groups",
        measurement=f"{_MEASURED}.attention:gated_output",
        world=2,
        without=(Raises("RuntimeError", "is invalid for input of size"),),
    ),
    Check(
        patch="gated-delta-norm-gradient",
        measurement=f"{_MEASURED}.attention:output_norm",
        world=2,
        without=(Gap(0.1),),
    ),
    Check(
        patch="cross-attention-groups",
        measurement=f"{_MEASURED}.attention:given_ranks",
        world=2,
        without=(Gap(1.0),),  # twice as many
        agreement=0.0,
    ),
    Check(
        patch="mrope-packed",
        measurement=f"{_MEASURED}.mtp:packed_positions",
        world=2,
        without=(
            Gap(1e-2),
            Raises("RuntimeError", "is invalid for input of size"),  # 0.12 cuts another dimension
        ),
    ),
    Check(
        patch="mtp-whole-embeddings",
        measurement=f"{_MEASURED}.mtp:whole_embeddings",
        world=2,
        without=(Raises("RuntimeError", "Sizes of tensors must match"),),
    ),
    Check(
        patch="optimizer-checkpoint-default",
        measurement=f"{_MEASURED}.checkpoints:default_form",
        without=(Raises("CheckpointingException", "flattened_range is not supported"),),
        agreement=0.0,
    ),
    Check(
        patch="dp-reshardable-steps",
        measurement=f"{_MEASURED}.checkpoints:steps",
        without=(Gap(0.5),),  # one step of three
        agreement=0.0,
    ),
    Check(
        patch="padding-mask-expert-bias",
        measurement=f"{_MEASURED}.experts:expert_bias",
        without=(Raises("RuntimeError", "must match the size of tensor"),),
        agreement=0.0,
    ),
    Check(
        patch="padding-mask-own-count",
        measurement=f"{_MEASURED}.experts:own_count",
        world=2,
        without=(Gap(0.5),),  # twice as large
    ),
    Check(
        patch="global-aux-loss-tokens",
        measurement=f"{_MEASURED}.experts:global_loss",
        without=(Gap(1e-2),),
    ),
    Check(
        patch="label-smoothing-over-ranks",
        measurement=f"{_MEASURED}.gradients:label_smoothing",
        world=2,
        without=(Gap(1e-2),),
    ),
    Check(
        patch="loss-of-gathered-logits",
        measurement=f"{_MEASURED}.gradients:gathered_logits",
        world=2,
        without=(Gap(1e-2),),
    ),
)
CHECKS = {check.patch: check for check in _CHECKS}
