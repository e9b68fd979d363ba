"""tests.vision.rank on emulated NPUs, with what reached the kernel of attention, and a mask that must not.

python -m tests.npu.seeing DIRECTORY LAYOUT (of tests.vision.rank) prints what that prints, the calls of
npu_fusion_attention without repetition, and what a model says that is given a mask of valid tokens.
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bundle import backends
from bundle.errors import JobFailed
from bundle.patches import applying
from bundle.verification import decide, everything
from tests import world
from tests.vision import rank
from tests.vision.cases import CASES


def main(directory: Path, layout: str) -> None:
    torch.set_num_threads(1)
    applying.apply(everything(decide(world.backend())))
    runtime = backends.prepare(world.backend())
    world.join()
    from bundle.backends.ascend import attention
    from bundle.engine import Engine

    reached: list[dict[str, Any]] = []
    fused, log_probs, said = attention.fused, Engine.log_probs, []

    def noted(query: Any, key: Any, value: Any, inputs: Any, **options: Any) -> Any:
        call = inputs.keywords()
        mask = call.pop("atten_mask")
        call = {name: given for name, given in call.items() if given}
        call["atten_mask"] = None if mask is None else list(mask.shape)
        if call not in reached:
            reached.append(call)
        return fused(query, key, value, inputs, **options)

    def asked(engine: Any, batches: Any, **options: Any) -> Any:
        """Before the log-probabilities: the same rows, with a mask of valid tokens beside them."""
        (given,) = batches
        valid = torch.ones_like(given.ids, dtype=torch.bool)
        try:
            with torch.no_grad():
                engine.models[0](
                    given.ids, given.position_ids, valid, packed_seq_params=given.packed_seq_params
                )
        except JobFailed as error:
            said.append(str(error))
        return log_probs(engine, batches, **options)

    with patch.object(attention, "fused", noted), patch.object(Engine, "log_probs", asked):
        case = CASES[0]
        with runtime.megatron():
            far = rank.distances(case, directory / case.name, layout, runtime)
    print(json.dumps({"far": far, "reached": reached, "said": said}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
