"""Calls that op-plugin refuses by itself, before it looks for a kernel; prints what it says, as JSON.

Run by test_operator with the stand-in libraries: their device has no kernel, so that a call which op-plugin
takes ends with the name of the kernel that is missing.
"""

import json
from typing import Any

import torch

WHOLE, PACKED = (2, 4, 16, 8), (32, 4, 8)
CALLS: dict[str, tuple[tuple[int, ...], int, str, dict[str, Any]]] = {
    "good": (WHOLE, 4, "BNSD", {}),
    "good packed": (PACKED, 4, "TND", {"actual_seq_qlen": [5, 32], "actual_seq_kvlen": [5, 32]}),
    "good in small letters": (WHOLE, 4, "bnsd", {}),
    "packed in small letters": (PACKED, 4, "tnd", {"actual_seq_qlen": [32], "actual_seq_kvlen": [32]}),
    "no heads": (WHOLE, 0, "BNSD", {}),
    "layout": (WHOLE, 4, "XXX", {}),
    "dimensions": ((16, 32), 4, "SBH", {}),
    "keep_prob": (WHOLE, 4, "BNSD", {"keep_prob": 0.0}),
    "mode": (WHOLE, 4, "BNSD", {"sparse_mode": 7}),
    "mode packed": (
        PACKED,
        4,
        "TND",
        {"sparse_mode": 5, "actual_seq_qlen": [5, 32], "actual_seq_kvlen": [5, 32]},
    ),
    "no ends": (PACKED, 4, "TND", {}),
    "ends": (PACKED, 4, "TND", {"actual_seq_qlen": [5, 32], "actual_seq_kvlen": [32]}),
    "softmax_layout": (WHOLE, 4, "BNSD", {"softmax_layout": "TND"}),
}


def answers(operator: Any, device: str) -> dict[str, str]:
    """The first line of each refusal, or "done"."""
    said = {}
    for name, (shape, heads, layout, options) in CALLS.items():
        x = torch.zeros(shape).to(device)
        try:
            operator(x, x, x, heads, layout, **options)
        except RuntimeError as error:
            said[name] = str(error).splitlines()[0]
        else:
            said[name] = "done"
    return said


def main() -> None:
    print(json.dumps(answers(torch.ops.npu.npu_fusion_attention, "npu")))


if __name__ == "__main__":
    main()
