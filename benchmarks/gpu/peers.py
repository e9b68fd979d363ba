"""Speed and memory of `mcore-bundle train` beside transformers, PEFT and plain torch, on one device.

python -m benchmarks.gpu.peers [--only CASE...] [--variants sdpa compiled liger] [--tiny] [--set KEY=VALUE...]
    [--peer-micro-batch SIZE]

Each case draws a model with transformers, saves it, and trains it 20 steps with `mcore-bundle train` and then
with `benchmarks.gpu.peer`: the same weights, number of tokens, sequence length and dtype of optimizer states.
The peer has the largest micro-batch that fits, and recomputes layers only where one sequence does not fit.
`--peer-micro-batch` saves the time to try larger ones.
A step lasts from the end of the last one to its end; speeds are medians of the steps from the sixth on. The
lines of our log before a row tell what the start was spent on. Ends with 1 where a run fails, or where the
ratio to the uncompiled peer is below that of `RATIOS`. A case needs 20 GiB of disk. `--tiny`: four small
layers, for a machine without a GPU. `--set` changes mcore-bundle's recipe, but the peer stays the same: with
`model.fp8` it trains in bf16.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from PIL import Image
from tokenizers import Tokenizer

from benchmarks.gpu.peer import OUT_OF_MEMORY
from benchmarks.gpu.vision import load_digits_program

STEPS, WARM_UP = 20, 5
_RANK_END_SECONDS = 10  # a killed launcher's ranks end within 5 s
LETTERS = "etaoin shrdlu"
RATIOS = {"full": 1.5, "lora": 1.7, "experts": 2.0, "dpo": 1.5, "vision": 1.2}
_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
}
_1_7B = _QWEN3 | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
_8B = _QWEN3 | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
_EXPERTS = _QWEN3 | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
_VISION = {
    "model_type": "qwen2_5_vl",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128000,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": True,
    "image_token_id": 259,
    "video_token_id": 261,
    "vision_start_token_id": 258,
    "vision_end_token_id": 260,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_channels": 3,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}
# Each: model, tokens of a sequence, sequences (pairs) of a step.
CASES: Mapping[str, tuple[dict[str, Any], int, int]] = {
    "full": (_1_7B, 4096, 16),
    "lora": (_8B, 4096, 4),
    "experts": (_EXPERTS, 4096, 16),
    "dpo": (_1_7B, 2048, 8),
    "vision": (_VISION, 1024, 16),
}
PIXELS = 448  # of a side of an image
TEMPLATE_TOKENS = 24  # of a question and an answer about an image
_TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
_TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32}
_TINY |= {"num_experts": 8, "num_experts_per_tok": 2}


class RunFailed(Exception):
    """A program that ended with an error; its last lines."""


def main() -> int:
    """Print a row for each run; return 1 where a run fails or is too slow."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--variants", nargs="+", default=["sdpa"], choices=["sdpa", "compiled", "liger"])
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument("--set", action="append", default=[], help="a key of mcore-bundle's recipe")
    parser.add_argument("--peer-micro-batch", type=int, help="the largest size that is tried")
    options = parser.parse_args()
    print(
        "| case | by | tokens/s | ratio | GiB | micro-batch | s to the end of step 1 | loss of step 1, 20 |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    failed = False
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            try:
                failed |= not compare(name, Path(folder), options)
            except RunFailed as error:
                print(f"FAILED {name}: {error}", flush=True)
                failed = True
    return int(failed)


def compare(name: str, folder: Path, options: argparse.Namespace) -> bool:
    """Run a case by us and by its peers; return whether all ran, and we are fast enough."""
    config, length, sequences = CASES[name]
    if options.tiny:
        config, length, sequences = shrink(config), 512 if name == "vision" else 128, 2
    case: dict[str, Any] = {
        "task": name, "model": str(folder / "model"), "sequence_length": length, "sequences": sequences,
        "steps": STEPS, "lr": 1e-5, "prompt_length": length // 8,
    }  # fmt: skip
    tokens = length * sequences * (2 if name == "dpo" else 1)
    if name == "vision":
        case["image"] = describe_image(config)
        case["prompt_length"] = length - count_answer_tokens(case)
    (folder / "config.json").write_text(json.dumps(config))
    draw_model(folder / "config.json", folder / "model")
    case["ids"] = write_tokenizer(folder / "model", is_vision=name == "vision")
    (folder / "case.json").write_text(json.dumps(case))
    ours = run_bundle(case, folder, options.set, backend="cpu" if options.tiny else "cuda")
    print_row(name, "mcore-bundle", ours, tokens, 1.0)
    is_right = True
    for variant in options.variants:
        if name == "vision" and variant == "liger":
            continue  # AutoLigerKernelForCausalLM has no such models
        try:
            peer = run_peer(case, folder, variant, options.peer_micro_batch or sequences)
        except RunFailed as error:
            print(f"FAILED {name} {variant}: {error}", flush=True)
            is_right = False
            continue
        ratio = get_step_seconds(peer) / get_step_seconds(ours)
        print_row(name, variant, peer, tokens, ratio)
        is_right &= options.tiny or variant != "sdpa" or ratio >= RATIOS[name]
    return is_right


def run_peer(case: dict[str, Any], folder: Path, variant: str, largest: int) -> dict[str, Any]:
    """Return what the peer prints, for the largest micro-batch that fits, of `largest` at most."""
    sizes = [case["sequences"] >> shift for shift in range(case["sequences"].bit_length())]
    sizes = [size for size in sizes if size <= largest]
    for recompute in (False, True):
        for size in sizes:
            words = (str(folder / "case.json"), variant, str(size), str(int(recompute)), str(time.time()))
            command = [sys.executable, "-m", "benchmarks.gpu.peer", *words]
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            if not ended.returncode:
                setting = {"micro_batch_size": size, "recompute": recompute}
                result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
                return result | setting
            if ended.returncode != OUT_OF_MEMORY:
                raise RunFailed(ended.stderr[-3000:])
    raise RunFailed("one sequence does not fit into the memory")


# Draws a model of that config and saves it in bf16.
_DRAW_MODEL = """\
import json, sys, torch, transformers
values = json.load(open(sys.argv[1]))
config = transformers.AutoConfig.for_model(**values)
is_vision = "vision_config" in values
kind = transformers.AutoModelForImageTextToText if is_vision else transformers.AutoModelForCausalLM
torch.manual_seed(0)
with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
    model = kind.from_config(config, dtype=torch.bfloat16)
model.save_pretrained(sys.argv[2])
"""


def shrink(config: dict[str, Any]) -> dict[str, Any]:
    """Return a small config of the same kind."""
    small = config | {key: value for key, value in _TINY.items() if key in config}
    if "vision_config" in config:
        tower = {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 64,
        }
        small["vision_config"] = config["vision_config"] | tower | {"fullatt_block_indexes": [1]}
        small["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    return small


def describe_image(config: dict[str, Any]) -> dict[str, Any]:
    """Return what the peer must know of an image."""
    tower = config["vision_config"]
    side = PIXELS // tower["patch_size"]
    return {
        "grid": [1, side, side],
        "width": 3 * tower["temporal_patch_size"] * tower["patch_size"] ** 2,
        "tokens": side**2 // 4,
        "token_id": config["image_token_id"],
        "start_id": config["vision_start_token_id"],
        "end_id": config["vision_end_token_id"],
    }


def run_bundle(case: dict[str, Any], folder: Path, overrides: list[str], backend: str) -> dict[str, Any]:
    """Train by `mcore-bundle train`; return what the peer prints of itself."""
    (folder / "recipe.yaml").write_text(json.dumps(build_recipe(case, folder, backend)))
    arguments = [word for override in overrides for word in ("--set", override)]
    result = train_by_bundle([str(folder / "recipe.yaml"), *arguments], folder, STEPS)
    lines = (line for line in (folder / "log").read_text().splitlines() if " INFO rank 0: " in line)
    print(*lines, sep="\n", flush=True)
    return result


def train_by_bundle(arguments: list[str], folder: Path, steps: int) -> dict[str, Any]:
    """Run `mcore-bundle train` with these arguments; return what the peer prints, and more.

    The recipe reports each step. The launcher is killed after `steps` steps, before a checkpoint with
    optimizer states is written. `flops` is the work of a step. Raise RunFailed where it ends earlier.
    """
    directory = folder / "run"
    command = [sys.executable, "-m", "bundle", "train", *arguments, "--run-directory", str(directory)]
    started = time.time()
    lines: list[dict[str, Any]] = []
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None and len(lines) < steps:
            time.sleep(0.05)
            lines = read_steps(directory)
        if process.poll() is None:
            process.kill()
            process.wait()
            time.sleep(_RANK_END_SECONDS)
    if len(lines) < steps:
        raise RunFailed((folder / "log").read_text()[-3000:])
    job = json.loads((directory / "job.json").read_text())
    shutil.rmtree(directory)
    times, last = [line["time"] for line in lines[:steps]], lines[steps - 1]
    return {
        "losses": [line["train/loss"] for line in lines[:steps]],
        "seconds": [after - before for before, after in pairwise(times)],
        "first_step_seconds": times[0] - started,
        "peak_bytes": max(line.get("memory/peak_bytes", 0) for line in lines),
        "flops": last["train/tflops_per_device"] * 1e12 * last["train/step_seconds"],
        "micro_batch_size": job["recipe"]["train"]["micro_batch_size"],
        "recompute": bool(job["recipe"]["model"].get("recompute")),
    }


def read_steps(directory: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a run's metrics that have a loss."""
    path = directory / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [line for line in map(json.loads, text.split("\n")[:-1]) if "train/loss" in line]


def build_recipe(case: dict[str, Any], folder: Path, backend: str) -> dict[str, Any]:
    """Write the data of a case; return its recipe."""
    length, count = case["sequence_length"], case["sequences"] * (STEPS + 6)
    draw = random.Random(0)
    model: dict[str, Any] = {"path": case["model"], "dtype": "bf16"}
    data: dict[str, Any] = {"sequence_length": length, "validation": 0}
    task = {"dpo": "dpo", "vision": "sft"}.get(case["task"], "pretrain")
    if case["task"] == "lora":
        model["lora"] = {"rank": 16, "alpha": 32, "targets": "all-linear"}
    if task == "pretrain":
        (folder / "text").write_text("".join(draw.choices(LETTERS, k=count * length)))
        data |= {"source": "text", "path": [str(folder / "text")]}
    else:
        rows = [build_row(case, draw, folder) for _ in range(count)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data |= {"source": "jsonl", "path": [str(folder / "rows.jsonl")], "packed": False}
        data |= {"template": "none"} if task == "dpo" else {}
    if case["task"] == "vision":
        noise = draw.randbytes(3 * PIXELS**2)
        Image.frombytes("RGB", (PIXELS, PIXELS), noise).save(folder / "image.png")
    return {
        "name": "peers", "task": task, "backend": backend, "model": model, "data": data,
        "devices": {"per_node": 1},
        "train": {
            "steps": STEPS + 5, "micro_batch_size": "auto", "global_batch_size": case["sequences"],
            "eval_interval": 0, "log_interval": 1,
        },
        "optimizer": {"lr": case["lr"], "min_lr": case["lr"], "warmup_steps": 0},
        "checkpoint": {"interval": 0, "export": None}, "metrics": {"tensorboard": False},
    }  # fmt: skip


def build_row(case: dict[str, Any], draw: random.Random, folder: Path) -> dict[str, Any]:
    """Return a pair, or a question about an image, that fills a sequence."""
    length, prompt = case["sequence_length"], case["prompt_length"]

    def draw_text(count: int) -> str:
        return "".join(draw.choices(LETTERS, k=count)).replace(" ", "e")  # blanks at the ends may be lost

    if case["task"] == "dpo":
        texts = [draw_text(length - prompt - 1) for _ in range(2)]  # an end token follows
        return {"prompt": draw_text(prompt), "chosen": texts[0], "rejected": texts[1]}
    answer_length = count_answer_tokens(case)
    question_length = length - case["image"]["tokens"] - TEMPLATE_TOKENS - answer_length
    question = {"role": "user", "content": f"<image>{draw_text(question_length)}"}
    answer = {"role": "assistant", "content": draw_text(answer_length)}
    return {"images": ["image.png"], "messages": [question, answer]}


def count_answer_tokens(case: dict[str, Any]) -> int:
    """Return the tokens of an answer about an image: half of those that are neither image nor template."""
    tokens: int = case["sequence_length"] - case["image"]["tokens"] - TEMPLATE_TOKENS
    return tokens // 2


def write_tokenizer(directory: Path, *, is_vision: bool) -> list[int]:
    """Write a tokenizer of bytes that knows images; return its ids of `LETTERS`."""
    program = load_digits_program()
    program.write_tokenizer(directory)
    settings = directory / "preprocessor_config.json"
    sizes = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    settings.write_text(
        json.dumps(program.PROCESSING | sizes | {"min_pixels": PIXELS**2, "max_pixels": PIXELS**2})
    )
    if not is_vision:
        settings.unlink()
    ids: list[int] = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(LETTERS).ids
    return ids


def draw_model(config: Path, directory: Path) -> None:
    """Write a model of that config with drawn weights. Raise RunFailed where transformers refuses it."""
    command = [sys.executable, "-c", _DRAW_MODEL, str(config), str(directory)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RunFailed(ended.stderr[-3000:])


def get_step_seconds(run: dict[str, Any]) -> float:
    """Return the median time of the steps after the warm-up [s]."""
    return float(median(run["seconds"][WARM_UP - 1 :]))


def print_row(name: str, program: str, run: dict[str, Any], tokens: int, ratio: float) -> None:
    """Print a row of the table; `ratio` is our speed, as a multiple of this run's."""
    size = f"{run['micro_batch_size']}{', recomputed' if run['recompute'] else ''}"
    print(
        f"| {name} | {program} | {tokens / get_step_seconds(run):,.0f} | {ratio:.2f}"
        f" | {run['peak_bytes'] / 2**30:.1f} | {size} | {run['first_step_seconds']:.1f}"
        f" | {run['losses'][0]:.3f}, {run['losses'][-1]:.3f} |",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
