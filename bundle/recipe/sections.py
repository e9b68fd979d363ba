"""The sections of a recipe but its model's and its data's: what each key means, takes, and is by default."""

import math
from contextlib import suppress
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from bundle.environment import MOST_RANKS_PER_NODE
from bundle.recipe.section import (
    AS_TUPLE,
    Count,
    CountOrAuto,
    CountOrZero,
    DerivedDefaultsSection,
    NotNegative,
    Pair,
    Positive,
    Section,
    add_null,
)
from bundle.recipe.stages import (
    ChunkContents,
    assign_stages,
    count_rounds,
    divide_stages_into_chunks,
    find_stage_violations,
    parse_layout,
)


class Devices(Section):
    """How many devices the job takes."""

    nodes: Count = Field(default=1, description="Machines.")
    per_node: Count | None = Field(
        default=None,
        le=MOST_RANKS_PER_NODE,
        description="Devices of each machine; null: all of them (cpu: the fewest ranks that `parallel`"
        " allows).",
    )


class Parallel(DerivedDefaultsSection):
    """Sizes of the parallel groups: pp x dp x cp x tp ranks, for experts pp x expert dp x ep x etp."""

    tp: Count = Field(default=1, description="Tensor parallel size.")
    pp: Count = Field(default=1, description="Pipeline stages.")
    vpp: Count | None = Field(
        default=None,
        description="Model chunks per pipeline stage (interleaved schedule). null: those of"
        " pipeline_model_parallel_layout, or 1 without that key.",
    )
    num_layers_in_first_pipeline_stage: Count | None = Field(
        default=None,
        description="Decoder layers of the first stage, if it needs another number than the middle stages;"
        " null: the same number.",
    )
    num_layers_in_last_pipeline_stage: Count | None = Field(
        default=None,
        description="Decoder layers of the last stage, which also has the head and the MTP layers; null:"
        " as many as the middle stages.",
    )
    pipeline_model_parallel_layout: str | None = Field(
        default=None,
        min_length=1,
        max_length=10_000,
        description="Contents of each stage, instead of the two keys above, as megatron-core writes it"
        " (from 0.13): `Et*3|(tt|)*29,m|L`. E: embedding; t: decoder layer; m: MTP layer (from 0.14);"
        " L: head with the losses; |: end of a stage; *29: repeats a letter or a group 29 times. Each"
        " of the pp ranks gets one stage, then a second one, and so on (vpp). A stage with m needs"
        " megatron-core 0.16 if it has no t or no L. null: equal stages, except as the two keys above"
        " say.",
    )
    cp: Count = Field(default=1, description="Context parallel size: ranks that share one sequence.")
    ep: Count = Field(default=1, description="Expert parallel size: ranks that divide the experts.")
    etp: Count = Field(
        default=1,
        json_schema_extra=add_null,
        description="Tensor parallel size of experts. null or left out: the value of tp.",
    )
    sequence_parallel: bool = Field(
        default=False,
        json_schema_extra=add_null,
        description="Divide activations between tp ranks; null or left out: true if tp > 1.",
    )

    @classmethod
    def derive_defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return etp and sequence_parallel as tp says, and vpp as the layout says."""
        tp = values.get("tp", 1)
        derived = {"etp": tp, "sequence_parallel": isinstance(tp, int) and tp > 1}
        layout, pp = values.get("pipeline_model_parallel_layout"), values.get("pp", 1)
        if isinstance(layout, str) and isinstance(pp, int) and pp > 0:
            with suppress(ValueError):  # the rules say what is wrong
                chunks = count_rounds(parse_layout(layout), pp)
                derived["vpp"] = chunks if chunks != 1 else None
        return derived

    @property
    def model_ranks(self) -> int:
        """The ranks that hold one copy of everything but the experts: tp x cp x pp."""
        return self.tp * self.cp * self.pp

    @property
    def minimal_world(self) -> int:
        """The smallest number of ranks that fits: both tp x cp and etp x ep divide the ranks of a stage."""
        return self.pp * math.lcm(self.tp * self.cp, self.etp * self.ep)

    @property
    def pipeline_stages(self) -> tuple[str, ...]:
        """The stages of the layout string, each as its letters; empty without one.

        Raise ValueError for a text that is not a layout.
        """
        return parse_layout(text) if (text := self.pipeline_model_parallel_layout) else ()

    @property
    def mtp_rank(self) -> int:
        """The pipeline rank of the MTP layers, if there are any."""
        ranks = (number % self.pp for number, stage in enumerate(self.pipeline_stages) if "m" in stage)
        return next(ranks, self.pp - 1)

    def compute_stages(self, layers: int, mtp_layers: int) -> tuple[tuple[ChunkContents, ...], ...] | None:
        """Return the contents of each stage's chunks, as megatron-core assigns them; None: impossible.

        Without a layout string, the decoder's `layers` that the first and the last stage leave are divided
        evenly among the others. Each stage is divided evenly into its vpp chunks.
        """
        if self.pipeline_model_parallel_layout is None:
            lengths = self._compute_stage_lengths(layers)
            return None if lengths is None else divide_stages_into_chunks(lengths, self.vpp or 1, mtp_layers)
        try:
            layout = self.pipeline_stages
        except ValueError:
            return None
        if any(find_stage_violations(layout, self.pp, layers=layers, mtp_layers=mtp_layers)):
            return None
        return assign_stages(layout, self.pp)

    def _compute_stage_lengths(self, layers: int) -> tuple[int, ...] | None:
        """Return the number of a decoder's `layers` in each pipeline stage where no layout says it."""
        ends = (self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage)
        end_lengths = [length for length in ends if length is not None]
        middle_stages, middle_layers = self.pp - len(end_lengths), layers - sum(end_lengths)
        if middle_layers < middle_stages or middle_stages < 0 or (middle_layers and not middle_stages):
            return None
        middle_length, remainder = divmod(middle_layers, middle_stages) if middle_stages else (0, 0)
        if remainder or any(length % (self.vpp or 1) for length in (middle_length, *end_lengths)):
            return None
        first, last = (middle_length if length is None else length for length in ends)
        return (first, *[middle_length] * (self.pp - 2), last) if self.pp > 1 else (layers,)

    def is_minimal_world_multiple(self, world: int) -> bool:
        """Return whether `world` ranks can be laid out."""
        return world > 0 and world % self.minimal_world == 0

    def compute_dp(self, world: int) -> int:
        """Return the data-parallel size of a world that `is_minimal_world_multiple` accepts."""
        return world // self.model_ranks

    def compute_expert_dp(self, world: int) -> int:
        """Return the number of copies of each expert in a world that `is_minimal_world_multiple` accepts."""
        return world // (self.pp * self.etp * self.ep)


class EarlyStop(Section):
    """End training before its last step, when the validation loss stops falling."""

    patience: Count = Field(description="Evaluations in a row without a lower loss before training ends.")
    min_delta: NotNegative = Field(
        default=0.0, description="Smallest decrease of the lowest loss that counts [nats per token]."
    )


class Train(Section):
    """The length of the training (steps, samples or epochs) and its batch sizes."""

    steps: Count = Field(  # type: ignore[assignment]  # filled in or refused; of epochs, when data is read
        default=None,
        json_schema_extra=add_null,
        description="Optimizer steps; null or left out: computed from samples or epochs. --resume may"
        " raise this number, and the schedule then has the new length.",
    )
    samples: Count | None = Field(
        default=None,
        description="Instead of steps: samples (packed: packs) to train on, rounded up to whole steps.",
    )
    epochs: Positive | None = Field(
        default=None,
        description="Instead of steps: passes over the samples, rounded up to whole steps. The number of"
        " samples is known after tokenisation; `check` prints it.",
    )
    micro_batch_size: CountOrAuto = Field(
        default=1,
        description="Samples of one forward pass on one rank; DPO: pairs, of two rows each. auto: the plan"
        " chooses the size that is predicted to be the fastest and fits into the memory.",
    )
    global_batch_size: Count = Field(description="Samples of one optimizer step over all ranks.")
    eval_interval: CountOrZero = Field(
        default=100, description="Steps between evaluations; 0: only at the end."
    )
    eval_batches: Count = Field(default=8, description="Global batches of one evaluation.")
    early_stop: EarlyStop | None = Field(
        default=None,
        description="When to end early because the validation loss no longer falls; null: never.",
    )
    log_interval: Count = Field(default=10, description="Steps between reports.")
    loss_mean: Literal["token", "sequence"] = Field(
        default="token",
        description=(
            "How the loss is averaged. token: over all learned tokens. sequence: over the learned tokens of"
            " each sequence, then over the sequences. DPO ignores this key and averages over pairs. A step"
            " without learned tokens has no gradient, not even of"
            " balancing losses; weight decay, momentum and the learning rate still apply."
        ),
    )
    deterministic: bool = Field(
        default=False,
        description="Compute every number the same way in each run of the same job, by slower kernels. The"
        " plan names the settings. A run ends with an error at an operation without such a kernel.",
    )
    on_nan: Literal["stop", "skip"] = Field(
        default="stop",
        description=(
            "What to do if a gradient or a loss is not finite. stop: end the run. skip: leave out an update"
            " whose gradient is not finite, and continue if only a loss is not."
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _compute_steps_from_samples(cls, values: Any) -> Any:
        """Return the values with steps computed from samples, where steps are left out."""
        if not isinstance(values, dict) or values.get("steps") is not None:
            return values
        rest = {name: value for name, value in values.items() if name != "steps"}
        match rest.get("samples"), rest.get("global_batch_size"):
            case int(samples), int(batch) if samples > 0 and batch > 0 and rest.get("epochs") is None:
                return rest | {"steps": -(-samples // batch)}
        return rest

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.epochs is not None and (self.steps is not None or self.samples is not None):
            raise ValueError("set only one of steps, samples and epochs, and set the others to null")
        if self.steps is None and self.epochs is None:
            raise ValueError("set steps, samples or epochs")
        if self.samples is not None and self.steps != (computed_steps := self.count_steps(1, self.samples)):
            raise ValueError(
                f"samples {self.samples} in batches of {self.global_batch_size} make {computed_steps} steps,"
                f" but steps is {self.steps}. Set one of the two keys, and set the other to null"
            )
        return self

    @property
    def micro_batch_size_or_one(self) -> int:
        """The samples of a micro-batch; 1 until a plan has replaced `auto` by a number."""
        return 1 if self.micro_batch_size == "auto" else self.micro_batch_size

    def count_steps(self, epochs: float, samples: int) -> int:
        """Return the steps of so many epochs over `samples` samples; the last step is whole."""
        return math.ceil(Fraction(str(epochs)) * samples / self.global_batch_size)

    def exceeds(self, other: "Train") -> bool:
        """Return whether this is longer than `other`, where both give epochs or both give steps."""
        if self.epochs is not None and other.epochs is not None:
            return self.epochs > other.epochs
        return self.steps is not None and other.steps is not None and self.steps > other.steps


class Optimizer(DerivedDefaultsSection):
    """The optimizer, by megatron-core's names, and the learning rate of each step."""

    name: Literal["adam", "sgd"] = Field(
        default="adam", description="The algorithm: Adam with decoupled weight decay, or SGD with momentum."
    )
    use_distributed_optimizer: bool = Field(
        default=True,
        json_schema_extra=add_null,
        description="Divide the optimizer state between data-parallel ranks; null or left out: true for"
        " adam, which megatron-core can divide.",
    )
    use_precision_aware_optimizer: bool = Field(
        default=False,
        description="adam with bf16: use Transformer Engine's FusedAdam, with exp_avg_dtype and"
        " exp_avg_sq_dtype.",
    )
    # Not fp16: a step makes fp32 of all of it at once, which takes what was won (seen on an H200).
    exp_avg_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="Number format of adam's first moment; bf16 needs use_precision_aware_optimizer.",
    )
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="Number format of adam's second moment; bf16 needs use_precision_aware_optimizer.",
    )
    optimizer_cpu_offload: bool = Field(
        default=False,
        description="Keep and update the optimizer state on the host; needs use_precision_aware_optimizer.",
    )
    optimizer_offload_fraction: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="With optimizer_cpu_offload: share of the weights whose state is on the host.",
    )
    lr: Positive = Field(default=1e-3, description="Highest learning rate.")
    min_lr: NotNegative = Field(
        default=0.0,
        description="Learning rate at the last step; inverse-square-root: the lowest learning rate.",
    )
    warmup_steps: CountOrZero = Field(
        default=0, description="Steps in which the learning rate rises linearly to lr."
    )
    warmup_ratio: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Instead of warmup_steps: share of all steps, rounded up, at most all but the last.",
    )
    schedule: Literal["cosine", "linear", "constant", "inverse-square-root", "WSD"] = Field(
        default="cosine",
        description="How the learning rate falls after the warm-up, by megatron-core's names. WSD:"
        " constant until it falls in the last wsd_decay_steps.",
    )
    wsd_decay_steps: Count | None = Field(default=None, description="WSD: steps of the final decay.")
    wsd_decay_style: Literal["linear", "cosine", "exponential"] | None = Field(
        default=None, description="WSD: how the learning rate falls; null: exponential, as in megatron-core."
    )
    weight_decay: NotNegative = Field(
        default=0.1,
        description="Decay of matrices, not of norms and biases. adam: decoupled; sgd: in the gradient.",
    )
    betas: Pair = Field(default=(0.9, 0.95), description="adam: decay of the two moments.")
    eps: Positive = Field(default=1e-8, description="adam: added to the denominator.")
    sgd_momentum: NotNegative = Field(default=0.9, lt=1, description="sgd: decay of the momentum; 0: none.")
    clip_grad: NotNegative = Field(default=1.0, description="Largest gradient norm; 0: no clipping.")

    @classmethod
    def derive_defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the default of use_distributed_optimizer: true where megatron-core supports it."""
        return {"use_distributed_optimizer": values.get("name", "adam") == "adam"}

    def count_warmup(self, steps: int) -> int:
        """Return the steps of the warm-up in a run of so many steps."""
        if self.warmup_ratio is None:
            return self.warmup_steps
        return min(math.ceil(Fraction(str(self.warmup_ratio)) * steps), steps - 1)

    @property
    def moment_dtype_settings(self) -> dict[str, str]:
        """The types of the moments of a precision-aware optimizer, by key."""
        return {"exp_avg_dtype": self.exp_avg_dtype, "exp_avg_sq_dtype": self.exp_avg_sq_dtype}

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names in torch of the states that the optimizer keeps in fp32 for each weight."""
        if self.name == "sgd":
            return ("momentum_buffer",) if self.sgd_momentum else ()
        return ("exp_avg", "exp_avg_sq")


class Distributed(Section):
    """How ranks exchange gradients and weights."""

    overlap_grad_reduce: bool = Field(default=False, description="Reduce gradients during the backward pass.")
    overlap_param_gather: bool = Field(default=False, description="Gather weights during the forward pass.")
    bucket_size: Count | None = Field(
        default=None, description="Parameters per bucket of the reduction; null: megatron-core's choice."
    )
    timeout_seconds: Count = Field(
        default=600, description="Longest time of a collective; a longer one is a hang (exit code 6)."
    )


class Checkpoint(Section):
    """When to save, and how much to keep."""

    interval: CountOrZero = Field(default=100, description="Steps between checkpoints; 0: only at the end.")
    keep: Count = Field(default=2, description="Number of newest checkpoints to keep.")
    keep_best: Literal["accuracy"] | None = Field(
        default=None,
        description="rl: also keep the checkpoint with the highest accuracy of rl.evaluation; null: do not.",
    )
    async_: bool = Field(
        default=False, alias="async", description="Write in the background while training goes on."
    )
    export: Literal["hf", "hf-fp8", "peft"] | None = Field(
        default=None,
        description="hf: at the end, write the model into hf/ of the run directory for transformers, with"
        " adapters merged. hf-fp8: the same with linear layers in FP8, one scale per block of 128 x 128, as"
        " in DeepSeek-V3. peft: only the adapters of model.lora, for PEFT, into peft/. null: no export.",
    )
    export_interval: CountOrZero = Field(
        default=0,
        description="Steps between exports before the last one. Each has a folder with its step"
        " (hf-00000100), and none is removed. 0: only at the end.",
    )

    @property
    def peak_disk_count(self) -> int:
        """The most checkpoints on the disk at once: those that stay, and one more that is being written."""
        return self.keep + 1

    def count_exports(self, steps: int) -> int:
        """Return the number of exports that a run of so many steps leaves."""
        if self.export is None:
            return 0
        return 1 + ((steps - 1) // self.export_interval if self.export_interval else 0)


class WeightsAndBiasesSection(Section):
    """A run of Weights & Biases (extra `wandb`); WANDB_API_KEY authenticates the user."""

    project: str = Field(min_length=1, description="The project.")
    entity: str | None = Field(default=None, description="The team or user; null: the default one.")
    mode: Literal["online", "offline"] = Field(
        default="online", description="offline: write into the run directory, for `wandb sync`."
    )


class MLflowSection(Section):
    """A run of MLflow (extra `mlflow`)."""

    experiment: str = Field(min_length=1, description="The experiment, created if it does not exist.")
    tracking_uri: str | None = Field(
        default=None, description="The server; null: mlflow.db in the run directory."
    )


class PrometheusSection(Section):
    """An endpoint of rank 0 for Prometheus: /metrics, in OpenMetrics text."""

    port: int = Field(ge=0, le=65535, description="Port to listen on; 0: a free port, which the log names.")
    address: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address to listen on; 0.0.0.0 lets other machines ask, without authentication.",
    )

    @property
    def is_loopback(self) -> bool:
        return self.address in ("localhost", "::1") or self.address.startswith("127.")


class MetricsSection(Section):
    """Where metrics are written besides metrics.jsonl and the terminal."""

    tensorboard: bool = Field(default=True, description="Write TensorBoard event files.")
    wandb: WeightsAndBiasesSection | None = Field(default=None, description="A run of Weights & Biases.")
    mlflow: MLflowSection | None = Field(default=None, description="A run of MLflow.")
    prometheus: PrometheusSection | None = Field(default=None, description="An endpoint for Prometheus.")


class Profile(Section):
    """Steps whose trace is written by torch's profiler, into profile/ of the run directory."""

    steps: Annotated[tuple[Count, Count], AS_TUPLE] = Field(
        description="The first and the last step, counted from 1."
    )
    ranks: Annotated[tuple[CountOrZero, ...], AS_TUPLE] = Field(
        default=(0,), min_length=1, description="The ranks that write a trace."
    )
