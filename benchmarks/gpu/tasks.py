"""DPO, adapters and models that see images: whether two GPUs train as one does, through `mcore-bundle train`.

python -m benchmarks.gpu.tasks [--backend cuda] [--only TASK...] [--together 4]

Each task takes five steps on one GPU, and on two with tp 2, pp 2 (both in fp32) and cp 2 (packs in bf16,
because no attention kernel computes fp32 under cp). Ends with 1 where a loss is further than `NATS` from
that of one GPU.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CalledProcessError

from benchmarks.gpu.pretrained import train
from benchmarks.gpu.vision import RECIPE as DIGITS
from benchmarks.gpu.vision import SHAPES, load_digits_program

STEPS = 5
NATS = {"fp32": 1e-4, "bf16": 1e-2}
FEW = (
    f"train.steps={STEPS}",
    "train.log_interval=1",
    "train.eval_interval=0",
    "optimizer.warmup_steps=0",
    "checkpoint={interval: 0}",
    "metrics.tensorboard=false",
)
LAYOUTS = {"fp32": ("tp", "pp"), "bf16": ("cp",)}
PACKED = (
    "data.packed=true",
    "data.sequence_length=1024",
    "model.config.max_position_embeddings=2048",
    "train.micro_batch_size=1",
    "train.global_batch_size=1",
)
ROWS = {
    "text": ("train.global_batch_size=8", "train.micro_batch_size=2", "data.sequence_length=128"),
    "images": ("train.global_batch_size=8", "train.micro_batch_size=2"),
}


def main() -> int:
    """Run the tasks that were named; return 1 where a claim does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--together", type=int, default=4, help="runs at a time")
    parser.add_argument("--only", nargs="+")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tasks = build_tasks(Path(folder))
        jobs = [
            (task, dtype, layout)
            for task in options.only or tasks
            for dtype, layouts in LAYOUTS.items()
            for layout in ("", *layouts)
        ]

        def run(job: tuple[str, str, str]) -> list[float]:
            task, dtype, layout = job
            recipe, kind, keys = tasks[task]
            directory = Path(folder) / f"{task}-{dtype}-{layout}"
            shape = PACKED if dtype == "bf16" else ROWS[kind]
            sizes = [f"devices={{nodes: 1, per_node: {1 + bool(layout)}}}"]
            sizes += [f"parallel={{{layout}: 2}}"] * bool(layout)
            sizes += ["parallel.sequence_parallel=true"] * (layout == "tp")
            try:
                train(recipe, options.backend, directory, f"model.dtype={dtype}", *keys, *FEW, *shape, *sizes)
            except CalledProcessError:
                return []
            return read_numbers(directory)

        with ThreadPoolExecutor(options.together) as pool:
            numbers = dict(zip(jobs, pool.map(run, jobs), strict=True))
    verdicts = [judge(job, numbers) for job in jobs if job[2]]
    return int(not all(verdicts))


def build_tasks(folder: Path) -> dict[str, tuple[str, str, tuple[str, ...]]]:
    """Write the data of all tasks; return recipe, kind of the data and further keys of each."""
    text, pairs, digits = folder / "text.jsonl", folder / "pairs.jsonl", folder / "digits"
    write_rows(text, [{"prompt": f"{n} + {n}?", "response": f"{2 * n}, of course"} for n in range(64)])
    write_rows(
        pairs,
        [{"prompt": f"{n}?", "chosen": "yes " * (1 + n % 3), "rejected": "no " * 3} for n in range(64)],
    )
    program = load_digits_program()
    program.make(digits)
    seen = (
        f"data.path=[{digits / 'train.jsonl'}]",
        f"data.tokenizer=hf:{digits / 'tokenizer'}",
        "data.validation_sets={}",
    )
    adapters = "model.lora={rank: 8, alpha: 64, targets: [q_proj, v_proj, gate_proj, down_proj]}"
    language = ("data.source=jsonl", "optimizer.lr=1e-4", "optimizer.min_lr=0")
    preferences = ("task=dpo", "dpo.beta=0.5", "optimizer.lr=1e-5")
    return {
        "sft": ("qwen3-tp2-sp", "text", (*language, "task=sft", f"data.path=[{text}]")),
        "lora": ("qwen3-tp2-sp", "text", (*language, "task=sft", f"data.path=[{text}]", adapters)),
        "dpo": ("qwen3-tp2-sp", "text", (*language, *preferences, f"data.path=[{pairs}]")),
        **{shape: (str(DIGITS), "images", (*seen, *keys)) for shape, keys in SHAPES.items()},
    }


def write_rows(path: Path, rows: Sequence[object]) -> None:
    """Write rows of JSON."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_numbers(directory: Path) -> list[float]:
    """Return the losses of a run, then the gradient norm of its first step."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "train/loss" in line]
    return [*(line["train/loss"] for line in trained), trained[0]["train/grad_norm"]]


def judge(job: tuple[str, str, str], numbers: dict[tuple[str, str, str], list[float]]) -> bool:
    """Print a line about a run; return whether its losses are those of one GPU."""
    task, dtype, layout = job
    one, two = numbers[task, dtype, ""], numbers[job]
    is_whole = len(one) == len(two) == STEPS + 1
    gap = max((abs(a - b) for a, b in zip(one[:STEPS], two[:STEPS], strict=is_whole)), default=0.0)
    is_right = is_whole and gap <= NATS[dtype]
    losses = " ".join(f"{loss:.4f}" for loss in two[:-1])
    norms = f"{abs(two[-1] / one[-1] - 1):.1e}" if is_whole else "not there"
    print(
        f"{'ok' if is_right else 'FAILED':<7}{task} {dtype} {layout} 2: losses {losses}; {gap:.1e} from one"
        f" GPU's (at most {NATS[dtype]:g}); first gradient norm, relative: {norms}",
        flush=True,
    )
    return is_right


if __name__ == "__main__":
    sys.exit(main())
