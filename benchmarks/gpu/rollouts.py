"""Rollouts by SGLang on one GPU: coverage, the seconds of a sync, and training in turns.

python -m benchmarks.gpu.rollouts CASE... --python PYTHON

PYTHON is that of an environment with SGLang. Cases:
coverage-qwen3, coverage-deepseek: every tensor of the server is replaced by a sync, by files and in buckets,
    and a sync that leaves out one tensor, one layer or the draft fails and names it.
sync-4b-files, sync-4b-ipc: the seconds of the steps of a sync of Qwen3-4B.
Ends with 1 where a claim does not hold.
"""

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bundle.errors import JobFailed
from bundle.recipe import Recipe, load
from bundle.rollouts import Request, Sampling
from bundle.rollouts.sglang import SGLangRollout
from bundle.rollouts.sglang.building import build_rollout
from bundle.rollouts.sglang.memory import TrainerMemory
from bundle.weight_sync.manifest import ExpectedTensors
from bundle.weight_sync.states import Step
from bundle.weight_sync.transports.ipc import build_module_aligned_buckets, send_buckets_in_background

HERE = Path(__file__).parent
MEMORY = TrainerMemory(torch.device("cuda", 0), needed=1)
_DRAFT = ["--speculative-algorithm", "NEXTN", "--speculative-num-steps", "1"]
_DRAFT += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2"]
_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
}
_QWEN3_4B = _QWEN3 | {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
_DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
}


def main() -> int:
    """Run the cases that were named; return 1 where a claim does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--python", required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    failed = []
    for case in options.cases:
        print(f"== {case}", flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            failed += [f"{case}: {claim}" for claim in CASES[case](options.python, Path(scratch))]
    print(*(f"FAILED {claim}" for claim in failed), sep="\n")
    return int(bool(failed))


def load_recipe(config: dict[str, Any], python: str, *arguments: str, transport: str = "ipc") -> Recipe:
    """Return the recipe of a model that a server of that Python serves."""
    return load(
        str(HERE / "grpo.yaml"),
        [
            f"model.config={config}",
            f"model.mtp.layers={config.get('num_nextn_predict_layers', 0)}",
            f"rl.rollout.python={python}",
            f"rl.rollout.arguments={list(arguments)}",
            f"rl.rollout.transport={transport}",
            "rl.rollout.verify=first",
        ],
    )


def draw_tensors(recipe: Recipe, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every published tensor with random values on the GPU, in the dtype of the model."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for name, shape in ExpectedTensors.from_architecture(recipe.architecture).expected.items():
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        yield name, torch.randn(shape, generator=generator, device="cuda", dtype=dtype) * 0.02


def measure_coverage(config: dict[str, Any], *arguments: str) -> Callable[[str, Path], Iterator[str]]:
    """Return the case of a model: each claim that does not hold."""

    def run(python: str, scratch: Path) -> Iterator[str]:
        recipe = load_recipe(config, python, *arguments)
        names = list(ExpectedTensors.from_architecture(recipe.architecture).expected)
        layer = f"model.layers.{config['num_hidden_layers'] - 1}."
        draft = f"model.layers.{config['num_hidden_layers']}."
        left_out = {
            "one tensor": [names[len(names) // 2]],
            "one layer": [name for name in names if name.startswith(layer)],
            "the draft": [name for name in names if name.startswith(draft)],
        }
        rollout = build_rollout(recipe, scratch / "logs", scratch, MEMORY)
        sync = rollout._replicas.all[0]
        try:
            for version in range(3):
                measure_seconds(rollout, version, list(draw_tensors(recipe, version)))
            generate(rollout, recipe.architecture.vocab_size, 3)
            for label, missing in left_out.items():
                if not missing:
                    continue
                for way, error in find_failures(rollout, recipe, missing):
                    print(f"without {label}, {way}: {error or 'taken'}", flush=True)
                    if not error:
                        yield f"a sync without {label} is taken by {way}"
            sync.failure, sync._reached = None, Step.RELEASE
            rollout.sync(9, draw_tensors(recipe, 9))
            generate(rollout, recipe.architecture.vocab_size, 9)
        finally:
            rollout.close()
            print_log(scratch)

    return run


def find_failures(
    rollout: SGLangRollout, recipe: Recipe, missing: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield how a sync without these tensors fails: by its names, and in both ways by checksums."""
    tensors = [(name, tensor) for name, tensor in draw_tensors(recipe, 5) if name not in missing]
    replicas = rollout._replicas
    replicas._bucket_manifest = None  # by files, which are compared before anything is paused
    try:
        rollout.sync(5, tensors)
        yield "names", ""
    except JobFailed as error:
        yield "names", str(error)
    weights = replicas._files.write(6, tensors)
    loads: dict[str, Callable[[Any], None]] = {
        "files": lambda replica: replica.load(weights.directory),
        "ipc": lambda replica: send_buckets_in_background(
            build_module_aligned_buckets(tensors), replica.load_bucket
        ),
    }
    sync = replicas.all[0]
    if sync.failure is None:
        sync.pause_and_release_memory()
    for way, send in loads.items():
        # The server lives, paused and released: it needs no start.
        sync.failure, sync._reached = None, Step.RELEASE
        try:
            sync.sync(6, send, lambda _: {}, proves_coverage=True)
            yield way, ""
        except JobFailed as error:
            yield way, str(error)


def measure_seconds(
    rollout: SGLangRollout, version: int, tensors: Sequence[tuple[str, torch.Tensor]]
) -> float:
    """Sync a version and print the seconds of all and of each step; return those from pause to resume."""
    torch.cuda.synchronize()
    started = time.monotonic()
    rollout.sync(version, tensors)
    seconds = time.monotonic() - started
    steps = {str(step): round(value, 3) for step, value in rollout._replicas.all[0].seconds.items()}
    print(f"sync {version}: {seconds:.3f} s, {steps}", flush=True)
    return seconds


def generate(rollout: SGLangRollout, vocab_size: int, seed: int) -> None:
    """Ask for 256 answers of 64 tokens and print the speed."""
    numbers = torch.randint(3, vocab_size, (256, 32), generator=torch.Generator().manual_seed(seed))
    requests = [Request(tuple(ids), number, 0) for number, ids in enumerate(numbers.tolist())]
    started = time.monotonic()
    answers = rollout.generate(requests, Sampling(1.0, 64, (), seed, seed))
    seconds = time.monotonic() - started
    tokens = sum(len(answer.ids) for answer in answers)
    print(f"{len(answers)} answers, {tokens / seconds:,.0f} tokens/s, {seconds:.2f} s", flush=True)


def measure_sync(transport: str) -> Callable[[str, Path], Iterator[str]]:
    """Return the case of a transport: five syncs of Qwen3-4B, and what is wrong with the last."""

    def run(python: str, scratch: Path) -> Iterator[str]:
        recipe = load_recipe(_QWEN3_4B, python, transport=transport)
        rollout = build_rollout(recipe, scratch / "logs", scratch, MEMORY)
        seconds = 0.0
        try:
            for version in range(5):
                tensors = list(draw_tensors(recipe, version))
                rollout.release_cache_until_sync()
                seconds = measure_seconds(rollout, version, tensors)
                del tensors
                torch.cuda.empty_cache()
            for step, value in rollout._replicas.all[0].seconds.items():
                if step in (Step.RELEASE, Step.RESUME) and value > 0.05:
                    yield f"{step} after {value:.3f} s"
            if seconds > (limit := {"files": 10, "ipc": 1}[transport]):
                yield f"{seconds:.2f} s, and {limit} are allowed"
        finally:
            rollout.close()
            print_log(scratch)

    return run


def print_log(scratch: Path) -> None:
    """Print the end of what the servers wrote."""
    for path in sorted(scratch.rglob("server-*.log")):
        lines = path.read_text(errors="replace").splitlines()
        print(path.name, *[line[:300] for line in lines[-25:]], sep="\n", flush=True)


CASES: dict[str, Callable[[str, Path], Iterator[str]]] = {
    "coverage-qwen3": measure_coverage(_QWEN3),
    "coverage-deepseek": measure_coverage(_DEEPSEEK, *_DRAFT),
    "sync-4b-files": measure_sync("files"),
    "sync-4b-ipc": measure_sync("ipc"),
}

if __name__ == "__main__":
    sys.exit(main())
