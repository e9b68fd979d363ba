"""Whether a GPU begins with the weights of a Hugging Face directory, and gives them back.

python -m benchmarks.gpu.pretrained [--backends cpu cuda] [--only RECIPE...]

For latent attention with experts and MTP, for grouped queries, and for gated delta nets with experts: a few
steps on the cpu, exported. Each backend then begins with that directory, takes one step in fp32 with a
learning rate that moves no weight, and exports. Ends with 1 where a backend's losses are not the first one's,
within `NATS`, or where a tensor that it writes is not bit by bit the one that it read.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors import safe_open

# What `train` is given by what it is called here.
RECIPES = {
    "demo": "demo",
    "qwen3-cp2-packed": "qwen3-cp2-packed",
    "hybrid": str(Path(__file__).with_name("hybrid.yaml")),
}
NATS = 1e-3
_ALIKE = ("parallel={}", "model.dtype=fp32", "data.validation=0", "checkpoint.export=hf")
# No fp32 weight feels 1e-30 of an update; the steering bias moves by its own rate.
_STILL = (
    "train.steps=1",
    "optimizer={lr: 1.0e-30, min_lr: 0, warmup_steps: 0, weight_decay: 0}",
)
_STEERED = ("model.moe.bias_update_rate=0",)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", nargs="+", default=["cpu", "cuda"])
    parser.add_argument("--only", nargs="+", default=list(RECIPES), choices=RECIPES)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        return max([judged(recipe, given.backends, Path(scratch) / recipe) for recipe in given.only])


def judged(recipe: str, backends: list[str], scratch: Path) -> int:
    """1 where a claim about `recipe` does not hold; a line of numbers for each backend."""
    train(RECIPES[recipe], "cpu", scratch / "origin", "train.steps=5", "optimizer.warmup_steps=0")
    origin = scratch / "origin" / "hf"
    still = _STILL + (_STEERED if recipe == "demo" else ())
    losses: list[list[float]] = []
    failed = 0
    for backend in backends:
        directory = scratch / backend
        train(RECIPES[recipe], backend, directory, f"model.path={origin}", "model.config={}", *still)
        losses.append(first_losses(directory))
        gap = max(abs(one - other) for one, other in zip(losses[0], losses[-1], strict=True))
        compared, other = differences(origin, directory / "hf")
        print(
            f"{recipe} on {backend}: losses {losses[-1]}, {gap:.1e} from {backends[0]}'s;"
            f" {compared} tensors, {len(other)} differ {other[:3] or ''}",
            flush=True,
        )
        failed |= gap > NATS or bool(other)
    return failed


def train(recipe: str, backend: str, directory: Path, *overrides: str) -> None:
    """Trains in `directory`, by a recipe's name or file. Raises CalledProcessError with what it wrote."""
    sets = [word for each in (*_ALIKE, f"backend={backend}", *overrides) for word in ("--set", each)]
    command = [
        sys.executable,
        "-m",
        "bundle",
        "train",
        recipe,
        "--run-directory",
        str(directory),
        *sets,
    ]
    environment = os.environ | {"NVIDIA_TF32_OVERRIDE": "0"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        print(ended.stdout[-3000:], ended.stderr[-3000:], sep="\n", file=sys.stderr)
        ended.check_returncode()


def first_losses(directory: Path) -> list[float]:
    """The losses of the first step of a run, the main one first."""
    first = json.loads((directory / "metrics.jsonl").read_text().splitlines()[0])
    return [number for name, number in first.items() if name.startswith("train/") and name.endswith("loss")]


def differences(one: Path, other: Path) -> tuple[int, list[str]]:
    """How many tensors a directory has, and which are not bit by bit in the other."""
    first, second = tensors(one), tensors(other)
    names = sorted(first.keys() | second.keys())
    return len(names), [name for name in names if first.get(name) != second.get(name)]


def tensors(directory: Path) -> dict[str, tuple[str, bytes]]:
    """The type and the bytes of every tensor of a directory of safetensors."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                tensor = file.get_tensor(name)
                found[name] = (str(tensor.dtype), tensor.contiguous().numpy().tobytes())
    return found


if __name__ == "__main__":
    sys.exit(main())
