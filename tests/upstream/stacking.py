"""How often megatron's forward pass is wrapped: by plan, once patched, patched again, and wrapped naively.

python -m tests.upstream.stacking prints these as a list.
"""

import json
from collections.abc import Callable
from typing import Any

from bundle import backends
from bundle.patches import patcher
from bundle.verification import build_needed_patch_plan, decide_patches

TARGET = "megatron.core.models.gpt.gpt_model:GPTModel.forward"


def main() -> None:
    plan = build_needed_patch_plan(decide_patches("cpu"))
    patcher.apply(plan)
    backends.set_up_runtime("cpu")
    from megatron.core.models.gpt.gpt_model import GPTModel

    from bundle.replacements.mtp import disable_mtp_without_labels

    counted = [sum(step.target == TARGET for step in plan.steps), depth(GPTModel.forward)]
    for _ in range(2):
        patcher.apply(plan)
    counted.append(depth(GPTModel.forward))
    for _ in range(2):
        GPTModel.forward = disable_mtp_without_labels(GPTModel.forward)
    print(json.dumps([*counted, depth(GPTModel.forward)]))


def depth(function: Callable[..., Any]) -> int:
    return 1 + depth(function.__wrapped__) if hasattr(function, "__wrapped__") else 0


if __name__ == "__main__":
    main()
