"""What the real torch-npu says of npu_fusion_attention, beside the emulated one; prints it as JSON.

Run by test_operator with the stand-in libraries: one process for all questions that change nothing.
"""

import inspect
import json
from typing import Any

import torch

from tests.backends.ascend.contract import npu_fusion_attention as emulated

SHAPES = {  # query, key, value: 4 heads over 2, heads of 24 and values of 16, as latent attention has them
    "BSH": ((2, 16, 96), (2, 16, 48), (2, 16, 32)),
    "SBH": ((16, 2, 96), (16, 2, 48), (16, 2, 32)),
    "BSND": ((2, 16, 4, 24), (2, 16, 2, 24), (2, 16, 2, 16)),
    "BNSD": ((2, 4, 16, 24), (2, 2, 16, 24), (2, 2, 16, 16)),
    "TND": ((16, 4, 24), (16, 2, 24), (16, 2, 16)),
}


def results(operator: Any, device: str, layout: str) -> list[tuple[list[int], str]]:
    """Shapes and dtypes of the output and of the softmax's maxima and sums."""
    ends = {"actual_seq_qlen": [5, 16], "actual_seq_kvlen": [5, 16]} if layout == "TND" else {}
    made = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in SHAPES[layout])
    return [(list(x.shape), str(x.dtype)) for x in operator(*made, 4, layout, **ends)[:3]]


def wrong_mask(operator: Any) -> str:
    """What the shape function of the real operator makes of a mask that the kernel refuses."""
    q = torch.zeros(2, 4, 16, 8, device="meta")
    operator(q, q, q, 4, "BNSD", atten_mask=torch.zeros(2, 16, device="meta"))
    return "taken"


def main() -> None:
    import torch_npu

    real = torch.ops.npu.npu_fusion_attention
    arguments = [
        (x.name, x.default_value if x.has_default_value() else "required")
        for x in real.default._schema.arguments
    ]
    parameters = [
        (p.name, "required" if p.default is p.empty else p.default)
        for p in inspect.signature(emulated).parameters.values()
    ]
    seen = {
        "version": torch_npu.__version__,
        "schema": str(real.default._schema),
        "same": torch_npu.npu_fusion_attention is real,
        "arguments": {"real": arguments, "emulated": parameters},
        "results": {
            layout: {"real": results(real, "meta", layout), "emulated": results(emulated, "cpu", layout)}
            for layout in SHAPES
        },
        "wrong mask": wrong_mask(real),
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
