"""The layouts in which routes are recorded and replayed, and the tiny model with experts."""

from dataclasses import dataclass, replace
from typing import Any

from bundle.fp8 import Scaling
from bundle.recipe import Recipe
from bundle.recipe.alignment import Alignment

LENGTHS = (17, 9, 2)
MICRO_BATCHES, VOCABULARY = 4, 64
FULL = {"granularity": "full"}

_MODEL = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.5,
    "output_router_logits": True,
    "mlp_only_layers": [0, 2],
}


@dataclass(frozen=True)
class Case:
    """One layout of parallel ranks and of sequences (`rows`: of equal length, not padded)."""

    name: str
    parallel: dict[str, Any]
    layout: str = "thd"
    layers: int = 4
    first_stage: int | None = None  # layers of the first pipeline stage, where stages are not equal
    mtp: bool = False
    recompute: bool = False
    scaling: Scaling | None = None

    @property
    def reference(self) -> "Case":
        """The same model and sequences on one process, everything kept."""
        name = f"{self.layout} {self.layers}{' mtp' * self.mtp}"
        return replace(self, name=name, parallel={}, first_stage=None, recompute=False)

    @property
    def alignment(self) -> Alignment:
        """How its sequences are padded."""
        sizes = self.recipe().parallel
        return Alignment(
            "thd" if self.layout == "thd" else "bshd",
            tp=sizes.tp,
            cp=sizes.cp,
            sequence_parallel=sizes.sequence_parallel,
            scaling=self.scaling,
        )

    def recipe(self) -> Recipe:
        """The job of this case."""
        model = {
            "config": _MODEL | {"num_hidden_layers": self.layers},
            "dtype": "bf16" if self.scaling else "fp32",
            "fp8": {"scaling": self.scaling} if self.scaling else None,
            "mtp": {"layers": int(self.mtp)},
            "recompute": FULL if self.recompute else None,
            "router_replay": True,
        }
        # Without the rules: no recipe has unequal stages yet.
        return Recipe.model_validate(
            {
                "name": "replay",
                "backend": "cpu",
                "model": model,
                "parallel": self.parallel,
                "data": {
                    "source": "text",
                    "path": ["none"],
                    "tokenizer": "hf:none",
                    "sequence_length": 64,
                    "packed": not self.mtp,
                },
                "train": {"steps": 1, "micro_batch_size": 1, "global_batch_size": MICRO_BATCHES},
                "optimizer": {"warmup_steps": 0},
            },
        )


CASES = (  # in every release
    Case("tp2 ep2 packed", {"tp": 2, "ep": 2, "etp": 1}),
    Case("cp2 packed, recomputed", {"cp": 2}, recompute=True),
    Case("ep2 packed, recomputed", {"ep": 2}, recompute=True),
    Case(
        "pp2 vpp2 padded rows with mtp, recomputed",
        {"pp": 2, "vpp": 2},
        layout="bshd",
        mtp=True,
        recompute=True,
    ),
    Case(
        "pp2 vpp2 of unequal stages, recomputed",
        {"pp": 2, "vpp": 2},
        layers=6,
        first_stage=2,
        recompute=True,
    ),
)
MORE = (  # in the default one
    Case("tp2 ep2 rows", {"tp": 2, "ep": 2, "etp": 1}, layout="rows"),
    Case("tp2 padded rows", {"tp": 2, "ep": 2, "etp": 1}, layout="bshd"),
    Case("cp2 padded rows with mtp", {"cp": 2}, layout="bshd", mtp=True),
    Case("pp2 packed, recomputed", {"pp": 2}, recompute=True),
    Case(
        "pp2 vpp2 laid out, recomputed",
        {"pp": 2, "pipeline_model_parallel_layout": "Et|ttt|t|tL"},
        layers=6,
        recompute=True,
    ),
)
