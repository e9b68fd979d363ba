"""The model of a recipe: whose architecture, in which arithmetic, recomputed how."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from bundle.fp8 import SCALINGS, Format, Scaling
from bundle.recipe.sections import Count, Names, NotNegative, Positive, Section, or_null


class FP8(Section):
    """FP8 matrix products: Transformer Engine's on GPUs, emulated on the cpu backend."""

    scaling: Scaling = Field(
        description="How scales are found: past steps, per tensor, per block, per 32 values (Blackwell)."
    )
    format: Format = Field(
        default="hybrid",
        json_schema_extra=or_null,
        description="Number format; hybrid takes e5m2 for gradients. Left out: e4m3 for blockwise and mxfp8.",
    )

    @classmethod
    def followers(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The format that a scaling is taken with."""
        named = [rule.format for scaling, rule in SCALINGS.items() if scaling == given.get("scaling")]
        return {"format": named[0] if named else "hybrid"}


class Recompute(Section):
    """Activations computed again in the backward pass instead of being kept."""

    granularity: Literal["full", "selective"] = Field(description="Whole layers, or only the named modules.")
    method: Literal["uniform", "block"] | None = Field(
        default=None,
        description="full: uniform chunks of layers, or the first layers of a stage. Default uniform.",
    )
    layers: Count | None = Field(
        default=None, description="full: layers per chunk (uniform) or per stage (block). Default 1."
    )
    modules: Names = Field(
        default=(),
        description="selective: core_attn, layernorm, mla_up_proj, mlp, moe, moe_act, shared_experts.",
    )

    @classmethod
    def followers(cls, given: dict[str, Any]) -> dict[str, Any]:
        """What each granularity recomputes."""
        full = given.get("granularity") == "full"
        return {"method": "uniform", "layers": 1} if full else {"modules": ("core_attn",)}


class MTP(Section):
    """Multi-token prediction: extra layers that predict tokens further ahead."""

    layers: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="Prediction depth; null: num_nextn_predict_layers of the config.",
    )
    loss_scale: NotNegative = Field(
        default=0.1, description="Weight of the MTP losses in the total (shared by the depths)."
    )
    detach_trunk: bool = Field(
        default=False, description="Keep the gradient of the MTP losses out of the layers below."
    )
    detach_embeddings: bool = Field(
        default=False, description="Keep it out of the word embedding and the output layer."
    )

    @property
    def detached(self) -> bool:
        """Whether the MTP losses leave any part of the model alone."""
        return self.detach_trunk or self.detach_embeddings


class Experts(Section):
    """What keeps experts equally busy; of a model with experts."""

    aux_loss_coeff: NotNegative | None = Field(
        default=None,
        description="Weight of the balancing loss of each layer; null: what the config asks for"
        " (aux_loss_alpha; router_aux_loss_coef where output_router_logits is true).",
    )
    z_loss_coeff: NotNegative = Field(
        default=0.0, description="Weight of the z-loss of each router, which keeps its logits small."
    )
    bias_update_rate: NotNegative = Field(
        default=1e-3,
        description="How far a steering bias (noaux_tc) moves in a step; 0: it stays.",
    )


class LoRA(Section):
    """Low-rank adapters, trained in the place of the weights."""

    path: str | None = Field(
        default=None,
        description="Directory of PEFT to begin with, which says all other keys; null: new adapters.",
    )
    rank: Count = Field(description="Rows of A and columns of B.")
    alpha: Positive = Field(description="B A counts alpha / rank times.")
    targets: Names = Field(
        min_length=1,
        description="Published names of the projections that get one, or their last parts: q_proj, v_proj,"
        " mlp.down_proj.",
    )


class Model(Section):
    """What is trained."""

    path: str | None = Field(
        default=None,
        description="Directory with a Hugging Face config.json; keys of `config` override its keys.",
    )
    weights: Literal["auto", "load", "random"] = Field(
        default="auto",
        description="What training begins with. auto: the safetensors in `path`; random ones, from `seed`,"
        " where it holds none. load: they must be there.",
    )
    config: dict[str, Any] = Field(
        default_factory=dict, description="Keys of a Hugging Face config.json; model_type names the family."
    )
    dtype: Literal["bf16", "fp32"] = Field(
        default="bf16", description="Arithmetic; master weights are fp32 either way."
    )
    attention: Literal["auto", "flash", "fused", "unfused"] = Field(
        default="auto", description="Attention kernel; auto: the backend's choice."
    )
    fp8: FP8 | None = Field(default=None, description="FP8 matrix products; null: none.")
    recompute: Recompute | None = Field(default=None, description="Activation recomputation; null: none.")
    lora: LoRA | None = Field(
        default=None,
        description="Train low-rank adapters beside frozen weights; null: train the weights.",
    )
    router_replay: bool = Field(
        default=False,
        description="Experts that routers chose can be recorded and given back (RL: rollout and training).",
    )
    mtp: MTP = Field(default_factory=MTP, description="Multi-token prediction.")
    moe: Experts = Field(default_factory=Experts, description="Balancing of experts.")

    @model_validator(mode="before")
    @staticmethod
    def _frozen(given: Any) -> Any:
        """Beside adapters nothing else changes: steering biases stay where nobody says otherwise."""
        if not isinstance(given, dict) or given.get("lora") is None:
            return given
        moe = given.get("moe") or {}
        return given | {"moe": {"bias_update_rate": 0.0} | moe} if isinstance(moe, dict) else given

    @model_validator(mode="after")
    def _described(self) -> Self:
        if self.path is None and not self.config:
            raise ValueError("give model.path or model.config")
        if self.path is None and self.weights == "load":
            raise ValueError("weights: load needs a path")
        return self
