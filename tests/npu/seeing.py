"""tests.vision.rank on emulated NPUs, with what reached the kernel of attention, and a mask that must not.

python -m tests.npu.seeing DIRECTORY LAYOUT (of tests.vision.rank) prints what that prints, the calls of
npu_fusion_attention of layers and of the tower, and what a model says that is given a mask of valid tokens.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bundle.errors import JobFailed
from tests.ranks import finish_rank, start_rank
from tests.vision import rank
from tests.vision.cases import CASES


def main(directory: Path, layout: str) -> None:
    runtime, _ = start_rank()
    from bundle.backends.ascend import attention, vision
    from bundle.engine import Engine
    from bundle.models.vision import build_multimodal_decoder_input

    said: list[str] = []
    fused, log_probs = attention.call_fused_attention, Engine.compute_log_probs

    def noting(calls: list[dict[str, Any]]) -> Callable[..., Any]:
        """The call of the kernel, and what it is told of what is seen, in `calls` without repetition."""

        def noted(query: Any, key: Any, value: Any, inputs: Any, **options: Any) -> Any:
            call = {name: given for name, given in inputs.to_keywords().items() if given is not None}
            if (mask := call.pop("atten_mask", None)) is not None:
                call["atten_mask"] = list(mask.shape)
            if call not in calls:
                calls.append(call)
            return fused(query, key, value, inputs, **options)

        return noted

    def asked(engine: Any, batches: Any, **options: Any) -> Any:
        """Before the log-probabilities: the same rows, with a mask of valid tokens beside them."""
        (given,) = batches
        model, valid = engine.models[0], torch.ones_like(given.ids, dtype=torch.bool)
        try:
            with torch.no_grad():
                model(
                    given.ids,
                    given.position_ids,
                    valid,
                    labels=given.labels,
                    loss_mask=given.loss_mask,
                    packed_seq_params=given.packed_seq_params,
                    decoder_input=build_multimodal_decoder_input(model, given.ids, given.images),
                )
        except JobFailed as error:
            said.append(str(error))
        return log_probs(engine, batches, **options)

    reached: list[dict[str, Any]] = []
    tower: list[dict[str, Any]] = []
    with (
        patch.object(attention, "call_fused_attention", noting(reached)),
        patch.object(vision, "call_fused_attention", noting(tower)),
        patch.object(Engine, "compute_log_probs", asked),
    ):
        case = CASES[0]
        with runtime.megatron_calls():
            far = rank.distances(case, directory / case.name, layout, runtime)
    finish_rank({"far": far, "reached": reached, "tower": tower, "said": said})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
