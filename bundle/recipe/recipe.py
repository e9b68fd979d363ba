"""The job file as one value that never changes, with the section of its model, and how two of them differ."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from bundle import hub
from bundle.architectures import Architecture, from_config
from bundle.architectures.contents import has_weights
from bundle.architectures.tensors import TOWER_PREFIX, is_projector
from bundle.environment import MOST_RANKS
from bundle.errors import format_value
from bundle.fp8 import SCALINGS, Format, Scaling
from bundle.recipe.alignment import Alignment
from bundle.recipe.data import Data
from bundle.recipe.defaults import LORA_DEFAULTS
from bundle.recipe.rl import RL
from bundle.recipe.section import (
    Count,
    DerivedDefaultsSection,
    Names,
    NotNegative,
    Positive,
    Section,
    VariableName,
    VariableValue,
    add_null,
    make_default_section,
)
from bundle.recipe.sections import (
    Checkpoint,
    Devices,
    Distributed,
    MetricsSection,
    Optimizer,
    Parallel,
    Profile,
    Train,
)
from bundle.recipe.tasks import TASKS, Task

# Keys that decide where, how fast and until when a run computes, not what; of samples, steps tell.
FREE_ON_RESUME = (
    "train.samples",
    "data.cache",
    "devices",
    "parallel",
    "distributed",
    "checkpoint",
    "environment",
    "metrics",
    "profile",
    "train.log_interval",
    "train.early_stop",
)


class FP8(DerivedDefaultsSection):
    """FP8 matrix products: Transformer Engine's on GPUs, emulated on the cpu backend."""

    scaling: Scaling = Field(
        description="Values that share a scale. delayed: a tensor, with a scale from past steps;"
        " tensorwise: a tensor, with a scale from its present values; blockwise: a block of a tensor;"
        " mxfp8: 32 values (Blackwell GPUs)."
    )
    format: Format = Field(
        default="hybrid",
        json_schema_extra=add_null,
        description="Number format. hybrid: e4m3, but e5m2 for gradients. null or left out: e4m3 with"
        " blockwise and mxfp8, else hybrid.",
    )

    @classmethod
    def derive_defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the number format that the scaling is used with."""
        formats = [rule.format for scaling, rule in SCALINGS.items() if scaling == values.get("scaling")]
        return {"format": formats[0] if formats else "hybrid"}


class Recompute(DerivedDefaultsSection):
    """Activations computed again in the backward pass instead of being kept."""

    granularity: Literal["full", "selective"] = Field(description="Whole layers, or only the named modules.")
    method: Literal["uniform", "block"] | None = Field(
        default=None,
        description="With granularity full. uniform: recompute all layers, in units of `layers` layers;"
        " block: the first `layers` layers of each pipeline stage. null: uniform.",
    )
    layers: Count | None = Field(
        default=None,
        description="With granularity full. uniform: layers per recomputed unit; block: recomputed layers per"
        " pipeline stage. null: 1.",
    )
    modules: Names = Field(
        default=(),
        description="selective: core_attn, layernorm, mla_up_proj, mlp, moe, moe_act, shared_experts.",
    )

    @classmethod
    def derive_defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the defaults of each granularity."""
        is_full = values.get("granularity") == "full"
        return {"method": "uniform", "layers": 1} if is_full else {"modules": ("core_attn",)}


class MTP(Section):
    """Multi-token prediction: extra layers that predict tokens further ahead."""

    layers: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="Prediction depth; null: num_nextn_predict_layers of the config.",
    )
    loss_scale: NotNegative = Field(
        default=0.1,
        description="Weight of all MTP losses together in the loss, divided equally among the layers.",
    )
    detach_trunk: bool = Field(
        default=False, description="Keep the gradient of the MTP losses out of the layers below."
    )
    detach_embeddings: bool = Field(
        default=False,
        description="Keep the gradient of the MTP losses out of the word embedding and the output layer.",
    )

    @property
    def has_detached_part(self) -> bool:
        """True if some part of the model gets no gradient of the MTP losses."""
        return self.detach_trunk or self.detach_embeddings


class Experts(Section):
    """How the load of experts is balanced, for models with experts."""

    aux_loss_coeff: NotNegative | None = Field(
        default=None,
        description="Weight of the balancing loss of each layer; null: from the config (aux_loss_alpha;"
        " router_aux_loss_coef if output_router_logits is true).",
    )
    z_loss_coeff: NotNegative = Field(
        default=0.0, description="Weight of the z-loss of each router, which keeps its logits small."
    )
    bias_update_rate: NotNegative = Field(
        default=1e-3,
        description="Change of a router's expert bias (noaux_tc) per step, independent of the learning rate."
        " 0: no change, which is the default in SFT, DPO and RL of published weights.",
    )


_LORA_DEFAULT_VALUES = {default.key.rpartition(".")[2]: default.value for default in LORA_DEFAULTS}


class LoRA(Section):
    """Low-rank adapters, trained instead of the weights. `{}` or true: all keys at their defaults."""

    path: str | None = Field(
        default=None,
        min_length=1,
        description="Adapters to start from: a PEFT directory, or ORG/NAME@REVISION of the Hub. Their config"
        " sets all other keys except loraplus_lr_ratio; only dropout may differ. null: new adapters.",
    )
    rank: Count = Field(default=_LORA_DEFAULT_VALUES["rank"], description="Rows of A and columns of B.")
    alpha: Positive = Field(
        default=_LORA_DEFAULT_VALUES["alpha"],
        description="Scale of adapters: alpha / rank; with use_rslora alpha / sqrt(rank).",
    )
    use_rslora: bool = Field(
        default=False,
        description="Rank-stabilised scale (rsLoRA: Kalajdzievski, 2023), as PEFT's use_rslora.",
    )
    dropout: float = Field(
        default=_LORA_DEFAULT_VALUES["dropout"],
        ge=0,
        lt=1,
        description="Share of each adapter's input that is dropped in training, as PEFT's lora_dropout.",
    )
    targets: Names = Field(
        default=_LORA_DEFAULT_VALUES["targets"],
        min_length=1,
        description="Published names of the projections that get an adapter, or their last parts: q_proj,"
        " v_proj, mlp.down_proj; all-linear: all of them.",
    )
    use_dora: bool = Field(
        default=False,
        description="Weight-decomposed adapters (DoRA: Liu et al., 2024), as PEFT's use_dora: each row of"
        " W + scale B A gets a trained magnitude as its norm.",
    )
    loraplus_lr_ratio: Positive = Field(
        default=1.0,
        description="Learning rate of B and of magnitudes, as a multiple of A's rate, optimizer.lr (LoRA+:"
        " Hayou et al., 2024).",
    )

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class VisionSection(Section):
    """Which parts of a vision tower are trained, and at which learning rates."""

    freeze_tower: bool = Field(
        default=False,
        description="Freeze the tower's weights, except the projector's: no gradient, no optimizer state.",
    )
    freeze_projector: bool = Field(
        default=False,
        description="Freeze the projector (the mergers), which gives embeddings the decoder's width.",
    )
    tower_lr: Positive | None = Field(
        default=None,
        description="Highest learning rate of the tower, with the same schedule; null: optimizer.lr.",
    )
    projector_lr: Positive | None = Field(
        default=None,
        description="Highest learning rate of the projector, with the same schedule; null: optimizer.lr.",
    )

    def is_tensor_frozen(self, name: str) -> bool:
        """Return whether the tensor of this name is frozen."""
        return (
            self.freeze_projector
            if is_projector(name)
            else self.freeze_tower and name.startswith(TOWER_PREFIX)
        )

    def find_tensor_lr(self, name: str) -> float | None:
        """Return the highest learning rate of the tensor of this name; None: the optimizer's."""
        return (
            self.projector_lr
            if is_projector(name)
            else self.tower_lr
            if name.startswith(TOWER_PREFIX)
            else None
        )


class Model(Section):
    """The model to train."""

    path: str | None = Field(
        default=None,
        min_length=1,
        description="Directory with a Hugging Face config.json, or a model of the Hub: ORG/NAME@REVISION,"
        " which the job pins to a commit; keys of `config` override its keys.",
    )
    weights: Literal["auto", "load", "random"] = Field(
        default="auto",
        description="Initial weights. auto: the safetensors in `path`, or random ones from `seed` if it"
        " has none. load: they must exist.",
    )
    config: dict[str, Any] = Field(
        default_factory=dict, description="Keys of a Hugging Face config.json; model_type names the family."
    )
    dtype: Literal["bf16", "fp32"] = Field(
        default="bf16", description="Number format of the computation. The master weights are always fp32."
    )
    attention: Literal["auto", "flash", "fused", "unfused"] = Field(
        default="auto", description="Attention kernel; auto: the backend's choice."
    )
    operators: Names | None = Field(
        default=None,
        description="Operations that run with operators of the accelerator (ascend: rms_norm, swiglu, rotary,"
        " permute, grouped_experts, adamw). All others run with torch. null: all that the backend has.",
    )
    fp8: FP8 | None = Field(default=None, description="FP8 matrix products; null: none.")
    recompute: Recompute | None = Field(default=None, description="Activation recomputation; null: none.")
    lora: LoRA | None = Field(
        default=None,
        description="Train low-rank adapters and freeze the weights; null: train the weights.",
    )
    router_replay: bool = Field(
        default=False,
        description="Let a program that uses the engine record and replay the routers' choice of experts."
        " `train` does neither.",
    )
    vision: VisionSection = make_default_section(
        "Which parts of the vision tower are trained, for models that have one."
    )
    mtp: MTP = make_default_section("Multi-token prediction.")
    moe: Experts = make_default_section("Balancing of experts.")

    @model_validator(mode="before")
    @staticmethod
    def _set_lora_bias_update_default(values: Any) -> Any:
        """Return the values with steering biases frozen by default where there are adapters.

        Beside adapters all other weights are frozen too.
        """
        if not isinstance(values, dict) or values.get("lora") is None:
            return values
        moe = values.get("moe") or {}
        return values | {"moe": {"bias_update_rate": 0.0} | moe} if isinstance(moe, dict) else values

    @property
    def is_pretrained(self) -> bool:
        """True if training begins with weights in `path`."""
        return (
            self.path is not None
            and self.weights != "random"
            and has_weights(Path(hub.build_cache_path_if_pinned(self.path)))
        )

    @model_validator(mode="after")
    def _require_path_or_config(self) -> Self:
        if self.path is None and not self.config:
            raise ValueError("set model.path or model.config")
        if self.path is None and self.weights == "load":
            raise ValueError("weights: load needs model.path")
        return self


class DPO(Section):
    """Direct preference optimisation (Rafailov et al., 2023) with its sigmoid loss, for task dpo.

    The reference is the initial model or, with adapters, the model without them. MTP layers learn the
    chosen answers, with the weight model.mtp.loss_scale.
    """

    beta: Positive = Field(
        default=0.1,
        description="Factor of the log-ratios; larger values keep the model closer to the reference.",
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="Share of pairs whose labels are assumed to be swapped (conservative DPO).",
    )


class BackendOptions(Section):
    """Options that apply to one backend only."""

    mindspeed: bool = Field(
        default=False,
        description="ascend: train through MindSpeed's layers instead of megatron's own; MindSpeed must be"
        " installed, and FP8 (Atlas A5) needs it.",
    )


class Recipe(DerivedDefaultsSection):
    """Everything a job is asked to do. `bundle.recipe.load` makes it and checks the rules."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$",
        description="Names the run directory and the job; lower-case letters, digits, dots and dashes.",
    )
    task: Literal["pretrain", "sft", "dpo", "rl"] = Field(
        default="pretrain",
        description="What is learned. pretrain: every token; sft: the responses; dpo: which of two responses"
        " is better; rl: from rewards of sampled answers.",
    )
    backend: Literal["auto", "cpu", "cuda", "ascend"] = Field(
        default="auto", description="The accelerator; auto: the one that the machine has."
    )
    backend_options: BackendOptions = make_default_section("Options that apply to one backend only.")
    seed: int = Field(
        default=1234, ge=0, le=2**31 - 1, description="Seed of initial weights, data order and dropout."
    )
    devices: Devices = make_default_section("How many devices the job takes.")
    model: Model = Field(description="The model to train.")
    parallel: Parallel = make_default_section("Sizes of the parallel groups.")
    data: Data = Field(description="The training data.")
    train: Train = Field(description="The length of the training and its batch sizes.")
    optimizer: Optimizer = make_default_section("The optimizer and its schedule.")
    distributed: Distributed = make_default_section("How ranks exchange gradients and weights.")
    dpo: DPO | None = Field(
        default=None, description="The loss of pairs of responses; null: none, or the defaults for task dpo."
    )
    rl: RL | None = Field(default=None, description="Reinforcement learning; null: none. Task rl needs it.")
    checkpoint: Checkpoint = make_default_section("When to save, and how much to keep.")
    environment: dict[VariableName, VariableValue | None] = Field(
        default={},
        description="Environment variables of the ranks, such as NCCL_DEBUG. A value here takes precedence"
        " over the plan's. null: the ranks get the value of the environment that starts them. Variables that"
        " name files or devices are not allowed.",
    )
    metrics: MetricsSection = make_default_section("Where metrics are written.")
    profile: Profile | None = Field(default=None, description="Steps to trace.")

    @classmethod
    def derive_defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the loss section that the task needs."""
        return {"dpo": {}} if values.get("task") == "dpo" else {}

    @cached_property
    def origins(self) -> Mapping[str, str]:
        """The origins of the values that loading filled in, by key; not a part of the recipe."""
        return {}

    @cached_property
    def architecture(self) -> Architecture:
        """The model's dimensions, with this job's MTP layers and balancing loss."""
        architecture = from_config(self.model.config, "model.config")
        layers, aux_loss_coeff = self.model.mtp.layers, self.model.moe.aux_loss_coeff
        if layers is not None:
            architecture = replace(architecture, mtp_layers=layers)
        if architecture.moe is not None and aux_loss_coeff is not None:
            architecture = replace(
                architecture,
                moe=replace(architecture.moe, aux_loss_coeff=aux_loss_coeff, unused_aux_loss_coeff=0.0),
            )
        return architecture

    @property
    def task_traits(self) -> Task:
        """The traits of the task: the rows that it learns from."""
        return TASKS[self.task]

    @property
    def documents_per_sample(self) -> int:
        """The number of token documents that always stay together: two for a pair."""
        return self.task_traits.documents_per_sample

    @property
    def micro_batch_full_rows(self) -> int:
        """The rows of `data.sequence_length` tokens in a micro-batch."""
        return self.train.micro_batch_size_or_one * (1 if self.data.packed else self.documents_per_sample)

    @property
    def loss_mean(self) -> Literal["token", "sequence"]:
        """The unit that the loss is a mean over; a mean over pairs is one over their sequences."""
        if self.rl is not None:
            return "sequence" if self.rl.loss.mean == "sequence" else "token"
        return "sequence" if self.task_traits.has_pairs else self.train.loss_mean

    @property
    def default_run_directory(self) -> Path:
        """The default directory of the run."""
        return Path("runs") / self.name

    def with_validation_set_as_data(self, name: str) -> "Recipe":
        """Return the recipe with all data of one of its validation sets as its data."""
        validation_set = self.data.validation_sets[name]
        changes = {
            "path": validation_set.path,
            "source": validation_set.source or self.data.source,
            "weights": None,
        }
        data = self.data.model_copy(update={**changes, "validation": 0.0, "validation_sets": {}})
        return self.model_copy(update={"data": data})

    def with_unchecked_sections(self, **sections: Section) -> "Recipe":
        """Return the recipe with other sections, which its rules have not checked; the model stays."""
        changed = self.model_copy(update=sections)
        for name in ("alignment", "features"):  # the copy has them as they were
            vars(changed).pop(name, None)
        return changed

    @cached_property
    def alignment(self) -> Alignment:
        """The multiples that this job's sequences are padded to, and that its lengths must have."""
        parallel, fp8 = self.parallel, self.model.fp8
        return Alignment(
            "thd" if self.data.packed else "bshd",
            tp=parallel.tp,
            cp=parallel.cp,
            sequence_parallel=parallel.sequence_parallel,
            scaling=fp8.scaling if fp8 else None,
        )

    @cached_property
    def features(self) -> frozenset[str]:
        """The names of the parts of megatron-core that this job uses; patches and traps ask for them.

        `attention-auto` is a name of its own, because the backend decides what auto means. `dp` is there when
        there is more than one replica, by the recipe's own device counts or else by the layout's smallest
        world.
        """
        architecture, model, parallel = self.architecture, self.model, self.parallel
        moe, mtp = architecture.moe is not None, architecture.mtp_layers > 0
        head_dims = architecture.head_dims
        world = self.devices.nodes * (self.devices.per_node or 0) or parallel.minimal_world
        granularity = model.recompute.granularity if model.recompute else None
        used = {
            "pretrain": self.task == "pretrain",
            "sft": self.task == "sft",
            "mla": architecture.mla is not None,
            "attention-sinks": architecture.sinks,
            "gated-delta-net": architecture.delta_net is not None,
            "output-gate": architecture.output_gate,
            "gqa": architecture.num_query_groups < architecture.num_attention_heads,
            "unequal-head-dims": head_dims[0] != head_dims[1],
            "tied-embeddings": architecture.tied_embeddings,
            "moe": moe,
            "router-replay": moe and model.router_replay,
            "expert-bias": architecture.moe is not None and architecture.moe.expert_bias,
            "mrope": bool(architecture.rotary_sections),
            "multimodal": architecture.vision is not None,
            "mtp": mtp,
            "mtp-detached": mtp and model.mtp.has_detached_part,
            "packed": self.data.packed,
            "tp": parallel.tp > 1,
            "sp": parallel.sequence_parallel,
            "pp": parallel.pp > 1,
            "vpp": parallel.vpp is not None,
            "cp": parallel.cp > 1,
            "ep": parallel.ep > 1,
            "etp-unlike-tp": moe and parallel.etp != parallel.tp,
            "all-experts-on-each-rank": moe and parallel.ep * parallel.etp == 1,
            "dp": parallel.compute_dp(world) > 1,
            "bf16": model.dtype == "bf16",
            "fp8": model.fp8 is not None,
            f"attention-{model.attention}": True,
            f"recompute-{granularity}": granularity is not None,
            "overlap-grad-reduce": self.distributed.overlap_grad_reduce,
            "overlap-param-gather": self.distributed.overlap_param_gather,
            "distributed-checkpoint": True,
            "async-checkpoint": self.checkpoint.async_,
            "lora": model.lora is not None,
            "adam": self.optimizer.name == "adam",
            "deterministic": self.train.deterministic,
            "optimizer-cpu-offload": self.optimizer.optimizer_cpu_offload,
            "mindspeed": self.backend_options.mindspeed,
        }
        return frozenset(name for name, is_used in used.items() if is_used)

    def _explain_least_ranks(self, world: int) -> str:
        """Return how many ranks the layout needs a multiple of, and why.

        Where a smaller expert parallel size fits `world`, the text names it.
        """
        p, moe = self.parallel, self.architecture.moe
        layout_text = f"tp {p.tp} x cp {p.cp} x pp {p.pp}"
        if moe is None:
            return f"{p.minimal_world} ranks ({layout_text}), but there are {world}"
        fewer = (ep for ep in range(min(p.ep - 1, moe.num_experts), 0, -1) if not moe.num_experts % ep)
        fitting_ep = next(
            (ep for ep in fewer if p.model_copy(update={"ep": ep}).is_minimal_world_multiple(world)), None
        )
        experts = f"experts: etp {p.etp} x ep {p.ep} x pp {p.pp}"
        instead = f". Set parallel.ep={fitting_ep}, which fits" if fitting_ep else ""
        return f"{p.minimal_world} ranks ({layout_text}, {experts}), but there are {world}{instead}"

    def find_layout_violations(self, world: int) -> list[str]:
        """Return every reason why `world` ranks cannot run this recipe; empty when they can."""
        parallel, train = self.parallel, self.train
        if world > MOST_RANKS:
            return [f"devices: {world} ranks exceed {MOST_RANKS}, the limit of a plan"]
        if not parallel.is_minimal_world_multiple(world):
            return [f"parallel: this layout needs a multiple of {self._explain_least_ranks(world)}"]
        portion = train.micro_batch_size_or_one * parallel.compute_dp(world)
        if train.global_batch_size % portion:
            return [
                f"train.global_batch_size: {train.global_batch_size} is not a multiple of micro_batch_size"
                f" x dp = {train.micro_batch_size_or_one} x {parallel.compute_dp(world)}; the next multiple"
                f" is {-(-train.global_batch_size // portion) * portion}"
            ]
        microbatches = train.global_batch_size // portion
        if parallel.vpp is not None and microbatches % parallel.pp:
            return [
                f"train.global_batch_size: {train.global_batch_size} gives {microbatches} micro-batches per"
                f" rank, but an interleaved pipeline (vpp) needs a multiple of pp {parallel.pp}"
            ]
        return []


class RecipeDifference(NamedTuple):
    """One key whose value changed; None where a side does not have it."""

    key: str
    old: Any
    new: Any

    @property
    def is_free_on_resume(self) -> bool:
        """True if a resumed run may change this key and still be the same run; `auto` asks for no number."""
        if self.key == "train.micro_batch_size" and self.new == "auto":
            return True
        return any(self.key == free or self.key.startswith(f"{free}.") for free in FREE_ON_RESUME)

    def __str__(self) -> str:
        old, new = (
            format_value(value) if "\n" in str(value) else repr(value) for value in (self.old, self.new)
        )
        return f"{self.key}: {old} -> {new}"


def list_differences(old: Recipe, new: Recipe) -> list[RecipeDifference]:
    """Return every key whose value differs, in the recipe's order."""
    before, after = dict(flatten(old.dump())), dict(flatten(new.dump()))
    keys = dict.fromkeys([*after, *before])
    return [RecipeDifference(k, before.get(k), after.get(k)) for k in keys if before.get(k) != after.get(k)]


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every key of nested mappings; an empty mapping is a value."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
