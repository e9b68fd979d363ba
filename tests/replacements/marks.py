"""Builds megatron's own layers over the stand-in and prints which of their weights are marked as split.

python -m tests.replacements.marks [PATCH...]   (the ids to apply)
"""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from bundle.environment.packages import detect
from bundle.patches import patcher, plan
from bundle.patches.megatron_core import find_installed_or_default_core, load_review_table
from bundle.patches.plan import survey_patches
from tests.replacements import transformer_engine


class _Config(SimpleNamespace):
    """Settings of which everything that is not said is off."""

    def __getattr__(self, name: str) -> Any:
        return None


def main(ids: list[str]) -> None:
    transformer_engine.install()
    here, table = detect(), load_review_table()
    whole = plan.build_patch_plan(
        survey_patches(find_installed_or_default_core(here, table), table, here, backend="cuda")
    )
    patcher.apply(replace(whole, steps=tuple(step for step in whole.steps if step.patch in ids)))
    from megatron.core import parallel_state
    from megatron.core.extensions import transformer_engine as te

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    config = _Config(expert_model_parallel_size=2, sequence_parallel=True, use_cpu_initialization=True)
    options = {"config": config, "init_method": None, "bias": False, "skip_bias_add": False}
    found = {}
    for mode in ("duplicated", None):
        layer = te.TELinear(8, 4, parallel_mode=mode, skip_weight_param_allocation=False, **options)
        found[f"linear {mode}"] = layer.weight.tensor_model_parallel
    for mode in ("column", "row"):
        layer = te.TEGroupedLinear(2, 8, 4, parallel_mode=mode, is_expert=True, **options)
        found[f"experts {mode}"] = [getattr(w, "tensor_model_parallel", None) for w in layer.parameters()]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
