"""Models of transformers' own classes with adapters on every projection, and what these change."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.families.cases import CASES as FAMILIES
from tests.families.cases import Case as Family

RANK, ALPHA = 3, 5.0
LR_RATIO = 4.0  # LoRA+
OPTIMIZER = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1, "clip_grad": 0.7}
_ATTENTION, _GATED = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


@dataclass(frozen=True)
class Case:
    """A family's model, and the projections of it that have an adapter."""

    of: Family
    targets: tuple[str, ...]
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)  # of PEFT's LoraConfig

    @property
    def scale(self) -> float:
        """PEFT's `scaling`."""
        return ALPHA / (math.sqrt(RANK) if self.options.get("use_rslora") else RANK)

    @property
    def loads(self) -> bool:
        """Whether PEFT loads all of it: beside stacked experts it drops other adapters of the same names."""
        return self.name not in ("latent", "experts with DoRA")


def _case(name: str, family: str, *targets: str, **options: Any) -> Case:
    return Case(next(case for case in FAMILIES if case.name == family), targets, name, options)


_ALL = (
    _case("dense", "qwen2 tied", *_ATTENTION, *_GATED),
    _case("some", "llama yarn", "q_proj", "v_proj", "mlp.up_proj"),
    _case("experts", "qwen3_moe mscale", *_ATTENTION, *_GATED),
    _case("latent", "deepseek_v3 plain", *_LATENT, *_GATED),
    _case("latent attention", "deepseek_v3 yarn as published", *_LATENT),
    _case("rsLoRA and DoRA", "qwen2 tied", *_ATTENTION[::2], *_GATED[1:], use_rslora=True, use_dora=True),
    _case("experts with DoRA", "qwen3_moe mscale", *_ATTENTION, *_GATED, use_dora=True),
)
CASES = {case.name: case for case in _ALL}
