"""The layouts that every release is trained in, and the tiny model that has everything: MLA, experts, MTP."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from packaging.version import Version

from bundle.recipe import Recipe, from_mapping

STEPS = 3
ROWS = 8
LENGTH = 32
VOCABULARY = 258

_MODEL = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,  # with the 32 beside it a multiple of 16, for FP8
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "aux_loss_alpha": 0.3,
    "seq_aux": True,
    "max_position_embeddings": 128,
}


@dataclass(frozen=True)
class Case:
    """One layout of the model; without MTP where a release has a known trap."""

    name: str
    parallel: dict[str, Any]
    mtp: bool = True
    dropout: float = 0.0
    arithmetic: dict[str, Any] = field(default_factory=lambda: {"dtype": "fp32"})
    optimizer: dict[str, Any] = field(default_factory=dict)
    layers: int = 4

    @property
    def reference(self) -> "Case":
        """The same model on one process."""
        name = "one process" if self.mtp else "one process without MTP"
        return Case(f"{name}, {self.layers} layers", {}, self.mtp, layers=self.layers)

    def recipe(self) -> Recipe:
        """The job of this case."""
        return from_mapping(
            {
                "name": "layouts",
                "backend": "cpu",
                "model": {
                    "config": _MODEL | {"attention_dropout": self.dropout, "num_hidden_layers": self.layers},
                    **self.arithmetic,
                    "mtp": {"layers": int(self.mtp)},
                    "moe": {"z_loss_coeff": 0.02},
                },
                "parallel": self.parallel,
                "data": {"source": "text", "path": ["stdlib"], "sequence_length": LENGTH},
                "train": {"steps": STEPS, "micro_batch_size": 2, "global_batch_size": ROWS},
                "optimizer": {"lr": 1e-3, "warmup_steps": 0, **self.optimizer},
            }
        )


LAYOUTS = (
    Case("tp2", {"tp": 2}),
    Case("pp2", {"pp": 2}),
    Case("pp2 vpp2", {"pp": 2, "vpp": 2}),
    Case("cp2", {"cp": 2}),
    Case("ep2", {"ep": 2}),
    Case("tp2 ep2", {"tp": 2, "ep": 2, "etp": 1}),
)


# The embedding alone, two layers, one, and one with MTP and the head; a rank has the first and the third.
LAID_OUT = "E|tt|t|tmL"


def layouts(release: str) -> tuple[Case, ...]:
    """The layouts of a release on two ranks.

    There is no layout string in 0.12, and none with MTP in 0.13.
    """
    if release.startswith("0.12."):
        return _without_trap(LAYOUTS)
    mtp = not release.startswith("0.13.")
    layout = LAID_OUT if mtp else LAID_OUT.replace("m", "")
    return (*LAYOUTS, Case("pp2 laid out", {"pp": 2, "pipeline_model_parallel_layout": layout}, mtp=mtp))


def _without_trap(cases: Sequence[Case]) -> tuple[Case, ...]:
    """The cases for 0.12, where MTP with tp2 is the known trap `mtp-tensor-parallel`."""
    return tuple(Case(case.name, case.parallel, mtp="tp" not in case.parallel) for case in cases)


# With MTP in a stage of its own, before that of the head: from 0.16 on.
_APART = (
    Case("apart", {"pp": 4, "pipeline_model_parallel_layout": "Et|tt|tm|L"}),
    Case("interleaved", {"pp": 4, "pipeline_model_parallel_layout": "E|t|t|t|t|tt|m|L"}, layers=6),
)
# Every rank has a part of half of the experts, for as many tokens as the router sends there.
_EXPERTS = (Case("tp2 ep2 etp2", {"tp": 2, "ep": 2, "etp": 2}),)


def larger_layouts(release: str) -> tuple[Case, ...]:
    """The layouts of a release on four ranks."""
    if release.startswith("0.12."):
        return _without_trap(_EXPERTS)
    return (*_EXPERTS, *_APART) if Version(release) >= Version("0.16") else _EXPERTS
