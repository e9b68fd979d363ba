"""Whether models that see images train on a GPU as on the cpu, and read digits in the end.

python -m benchmarks.gpu.vision [--backends cpu cuda] [--only SHAPE...] [--steps 600]

Needs scikit-learn and transformers. Two shapes of models, Qwen2.5-VL's and Qwen3-VL's, in rows and in packs,
in fp32 and in bf16: a few steps on the cpu, the same on the GPU. Then the digits of the demo in bf16 on the
last backend. Ends with 1 where a loss is further from the cpu's than `NATS` of its type, or where less than
`RIGHT` of the digits held out are read.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.pretrained import train

RECIPE = Path(__file__).parents[2] / "launch" / "demo" / "digits.yaml"
STEPS, RIGHT = 5, 0.95
# bf16 is held to its first steps: then what was rounded in another order grows.
NATS = {"fp32": (1e-3, STEPS), "bf16": (1e-2, 2)}
_QWEN3 = {
    "model_type": "qwen3_vl",
    "image_token_id": 259,
    "vision_start_token_id": 258,
    "vision_end_token_id": 260,
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "vocab_size": 264,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "initializer_range": 0.05,
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "in_channels": 3,
        "out_hidden_size": 64,
        "patch_size": 4,
        "temporal_patch_size": 1,
        "spatial_merge_size": 2,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 1],
        "hidden_act": "gelu_pytorch_tanh",
    },
}
SHAPES = {
    "qwen2_5_vl": ("model.config.max_position_embeddings=2048",),
    "qwen3_vl": (f"model.config={json.dumps(_QWEN3)}",),
}
FEW = (f"train.steps={STEPS}", "train.log_interval=1", "train.eval_interval=0", "optimizer.warmup_steps=0")
ROWS, PACKED = "rows", "packs"
# As many rows to a step as there are without packs, or nearly.
LAYOUTS = {
    ROWS: (),
    PACKED: (
        "data.packed=true",
        "data.sequence_length=1152",
        *(f"train.{of}_batch_size=1" for of in ("micro", "global")),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", nargs="+", default=["cpu", "cuda"])
    parser.add_argument("--only", nargs="+", default=tuple(SHAPES), choices=tuple(SHAPES))
    parser.add_argument("--steps", type=int, default=600, help="of the digits; 0: none")
    given = parser.parse_args()
    digits = load_digits_program()
    with tempfile.TemporaryDirectory() as folder:
        shown = Path(folder, "digits")
        digits.make(shown)
        wrong = [
            compared(shape, layout, dtype, given.backends, shown)
            for shape in given.only
            for layout in LAYOUTS
            for dtype in NATS
        ]
        if given.steps:
            run = shown.parent / "whole"
            last = ("model.dtype=bf16", f"train.steps={given.steps}", "train.eval_interval=0")
            trained(given.backends[-1], run, shown, *last)
            share = digits.score(shown, run / "hf")
            wrong.append(share < RIGHT)
            print(
                f"{'FAILED' if wrong[-1] else 'ok':<7}{share:.3f} of the digits held out are read", flush=True
            )
    return int(any(wrong))


def compared(shape: str, layout: str, dtype: str, backends: list[str], shown: Path) -> bool:
    """Whether a backend's losses are not the first one's; a line of numbers for each."""
    nats, steps = NATS[dtype]
    losses, failed = [], False
    for backend in backends:
        run = shown.parent / f"{shape}-{layout}-{dtype}-{backend}"
        how = (f"model.dtype={dtype}", *SHAPES[shape], *LAYOUTS[layout], *FEW)
        trained(backend, run, shown, *how)
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        losses.append([line["train/loss"] for line in lines if "train/loss" in line])
        gap = max(abs(one - other) for one, other in zip(losses[0][:steps], losses[-1][:steps], strict=True))
        wrong = len(losses[-1]) != STEPS or not gap <= nats
        failed |= wrong
        said = " ".join(f"{loss:.4f}" for loss in losses[-1])
        print(
            f"{'FAILED' if wrong else 'ok':<7}{shape} {layout} {dtype} on {backend}: {said}; {gap:.1e} from"
            f" {backends[0]}'s in {steps} steps (at most {nats:g})",
            flush=True,
        )
    return failed


def trained(backend: str, run: Path, shown: Path, *overrides: str) -> None:
    """Trains the recipe of the digits in `run`."""
    data = (
        f"data.path=[{shown / 'train.jsonl'}]",
        f"data.tokenizer=hf:{shown / 'tokenizer'}",
        "data.validation_sets={}",
    )
    train(str(RECIPE), backend, run, *data, *overrides)


def load_digits_program() -> Any:
    """Return launch/demo/digits.py, which is a program of its own."""
    spec = importlib.util.spec_from_file_location("digits", RECIPE.with_suffix(".py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
