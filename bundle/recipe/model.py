"""The model of a recipe: whose architecture, in which arithmetic, recomputed how."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from bundle.recipe.section import Count, Names, NotNegative, Section


class FP8(Section):
    """FP8 matrix products: Transformer Engine's on GPUs, emulated on the cpu backend."""

    scaling: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = Field(
        description="How scales are found: past steps, per tensor, per block, per 32 values (Blackwell)."
    )
    format: Literal["e4m3", "hybrid"] = Field(
        default="hybrid",
        description="Number format; hybrid takes e5m2 for gradients. Left out: e4m3 for blockwise and mxfp8.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fine_scales_need_no_wide_gradients(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("format") is None:
            fine = given.get("scaling") in ("blockwise", "mxfp8")
            return given | {"format": "e4m3" if fine else "hybrid"}
        return given


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

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        full = given.get("granularity") == "full"
        defaults = {"method": "uniform", "layers": 1} if full else {"modules": ("core_attn",)}
        return given | {name: value for name, value in defaults.items() if given.get(name) is None}


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
    detach: bool = Field(
        default=False, description="Keep the MTP loss out of the trunk, the embedding and the output layer."
    )


class Model(Section):
    """What is trained."""

    path: str | None = Field(
        default=None,
        description="Directory with a Hugging Face config.json; keys of `config` override its keys.",
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
    router_replay: bool = Field(
        default=False,
        description="Experts that routers chose can be recorded and given back (RL: rollout and training).",
    )
    mtp: MTP = Field(default_factory=MTP, description="Multi-token prediction.")

    @model_validator(mode="after")
    def _says_which(self) -> Self:
        if self.path is None and not self.config:
            raise ValueError("give model.path or model.config")
        return self
