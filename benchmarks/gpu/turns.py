"""GRPO on one GPU, a trainer and an SGLang server in turns, through `mcore-bundle train`.

python -m benchmarks.gpu.turns CASE... --python PYTHON [--results DIRECTORY]

PYTHON is that of an environment with SGLang. Cases:
arithmetic: a Qwen3 of 8 layers learns to add; its accuracy, the mismatch of log-probabilities, the memory of
    the device, and that the cache is released in every step.
speed: Qwen3-4B, 64 questions with 8 answers of 512 tokens, three steps, where their seconds go, and the
    tokens/s of SGLang's own benchmark.
updates: the updates of the same steps alone, from made-up answers; needs no SGLang.
kill-server, kill-trainer, kill-launcher: `kill -9` of that process; what is left after 20 s, and that the
    same command goes on.
Ends with 1 where a claim does not hold.
"""

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECIPE = str(HERE / "grpo.yaml")
# Qwen3-4B.
LARGE = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
QUESTIONS = 64  # of a step of Qwen3-4B
USED_MIB = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0")
LASTING = 5  # equal samples of 10 ms, one after the other
# The run is killed at such a process: what its command line and its environment have.
KILLED = {
    "server": ("guard.py", ""),
    "trainer": ("-m bundle", "LOCAL_RANK="),
    "launcher": ("-m torch.distributed.run", ""),
}


def main() -> int:
    """Run the cases that were named; return 1 where a claim does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--python")
    parser.add_argument("--results", type=Path, default=Path(tempfile.mkdtemp()))
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    options = parser.parse_args()
    failed = []
    for case in options.cases:
        print(f"== {case}", flush=True)
        python = [f"rl.rollout.python={options.python}"] if options.python else []
        overrides = [*python, *options.overrides]
        failed += [f"{case}: {claim}" for claim in CASES[case](options.results / case, overrides)]
    print(*(f"FAILED {claim}" for claim in failed), sep="\n")
    return int(bool(failed))


def start(directory: Path, overrides: Sequence[str]) -> subprocess.Popen[str]:
    """Start the command; its output goes to a file beside the run directory."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    words = [word for override in overrides for word in ("--set", override)]
    command = [sys.executable, "-m", "bundle", "train", RECIPE, "--run-directory", str(directory), *words]
    with directory.with_suffix(".log").open("a") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )


def train(directory: Path, overrides: Sequence[str]) -> tuple[int, float]:
    """Run the command to its end; return its code and seconds."""
    started = time.monotonic()
    code = start(directory, overrides).wait()
    if code:
        print(*directory.with_suffix(".log").read_text().splitlines()[-15:], sep="\n")
    return code, time.monotonic() - started


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl."""
    path = directory / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def list_values(lines: Sequence[dict[str, Any]], key: str) -> list[float]:
    """Return all values of a metric."""
    return [line[key] for line in lines if line.get(key) is not None]


def read_used_bytes() -> int:
    """Return the bytes of the first GPU that are in use."""
    return int(subprocess.run(USED_MIB, capture_output=True, text=True, check=True).stdout) * 2**20


@contextmanager
def watch_memory() -> Iterator[list[int]]:
    """Yield a list that has, at the end, the used bytes of the GPU of every 10 ms or more."""
    samples: list[int] = []
    with tempfile.TemporaryFile("w+") as lines:
        watcher = subprocess.Popen([*USED_MIB, "--loop-ms=10"], stdout=lines)
        try:
            yield samples
        finally:
            watcher.terminate()
            watcher.wait()
            lines.seek(0)
            whole = lines.read().rpartition("\n")[0]
            samples += [int(line) * 2**20 for line in whole.splitlines()]


def learn_arithmetic(directory: Path, overrides: Sequence[str]) -> Iterator[str]:
    """Yield the claims of a run of the arithmetic task that do not hold."""
    with watch_memory() as samples:
        code, seconds = train(directory, overrides)
    (directory.parent / "used.txt").write_text("\n".join(map(str, samples)))
    lines = read_metrics(directory)
    accuracies = list_values(lines, "evaluation/accuracy")
    mismatch = list_values(lines, "train/mismatch/log_prob_difference")
    print(f"code {code}, {seconds:.0f} s, accuracy {accuracies}", flush=True)
    print(f"mean |difference| of log-probabilities {[round(value, 5) for value in mismatch]}", flush=True)
    stage = json.loads((directory / "job.json").read_text())["plan"]["stages"][0]["bytes"]
    moments = find_moments(samples)
    for moment, used in moments.items():
        print(f"used: {used / 2**30:.2f} GiB, plan {stage[moment] / 2**30:.2f}, {moment}")
    text = "".join(path.read_text(errors="replace") for path in directory.rglob("server-*.log"))
    counts = [text.count(f"POST /{verb}_memory_occupation") for verb in ("release", "resume")]
    print(f"released {counts[0]} times, resumed {counts[1]} times", flush=True)
    if code:
        yield f"ends with {code}"
    if seconds > 480:
        yield f"takes {seconds:.0f} s"
    if not accuracies or accuracies[0] >= 0.4 or accuracies[-1] < 0.8:
        yield f"accuracy {accuracies[:1]} to {accuracies[-1:]}"
    if len(mismatch) > 10:
        first, last = (sum(part) / len(part) for part in (mismatch[:10], mismatch[-10:]))
        if max(mismatch) > 0.02 or last > 1.3 * first:
            yield f"log-probabilities differ by {max(mismatch):.4f}, {first:.5f} at first, {last:.5f} at last"
    for moment, used in moments.items():
        if abs(used / stage[moment] - 1) > 0.05:
            yield f"{used / 2**30:.1f} GiB are used, {moment}"


def find_moments(samples: Sequence[int]) -> dict[str, int]:
    """Return the most bytes in use with the cache of the server, and the most after its release.

    A sample belongs to sampling if it is above the middle of the lowest and the highest one. The samples
    before the first of these are of the start. Bytes count as used after a release if `LASTING` samples in
    a row are equal: within a release each sample has fewer bytes than the one before.
    """
    middle = (min(samples) + max(samples)) / 2
    started = next(place for place, used in enumerate(samples) if used > middle)
    levels = ((used, len(list(equal))) for used, equal in groupby(samples[started:]))
    lasting = (used for used, count in levels if used <= middle and count >= LASTING)
    return {"sampling": max(samples), "learning": max(lasting, default=0)}


def measure_updates(directory: Path, overrides: Sequence[str]) -> Iterator[str]:
    """Yield the claims of three updates of Qwen3-4B that do not hold; the answers are read from files."""
    data, answers = directory.parent / "questions.jsonl", directory.parent / "rollouts"
    answers.mkdir(parents=True, exist_ok=True)
    question = "What is the sum of 12 and 30?"
    data.write_text((json.dumps({"question": question, "answer": "42"}) + "\n") * QUESTIONS)
    for step in range(3):
        (answers / f"step-{step:08d}.jsonl").write_text("".join(make_answers(question, step)))
    replay = [f"data.path=[{data}]", "data.tokenizer=bytes", f"rl.rollout.path={answers}"]
    yield from measure_steps(directory, [*replay, *overrides])


def make_answers(question: str, step: int) -> Iterator[str]:
    """Yield the line of each answer, 512 random tokens, to the same question."""
    generator = random.Random(step)
    for number in range(QUESTIONS * 8):
        ids = [generator.randrange(256) for _ in range(512)]
        line = {
            "place": [0, 0],
            "prompt": question,
            "prompt_ids": list(question.encode()),
            "question": number // 8,
            "answer": number % 8,
            "ids": ids,
            "text": "",
            "reward": float(number % 2),
            "rewards": {"alternate": float(number % 2)},
            "finish_reason": "length",
            "log_probs": [-math.log(LARGE["vocab_size"])] * len(ids),
            "versions": [0] * len(ids),
        }
        yield json.dumps(line) + "\n"


def measure_speed(directory: Path, overrides: Sequence[str]) -> Iterator[str]:
    """Yield the claims of three steps of Qwen3-4B, updates and sampling, that do not hold."""
    yield from measure_steps(directory, overrides)
    lines, job = read_metrics(directory), json.loads((directory / "job.json").read_text())
    ours = list_values(lines, "rollout/tokens_per_second")
    config, words = directory.parent / "qwen3-4b.json", [str(QUESTIONS * 8), "512"]
    names = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "rope_theta": 1e6}
    config.write_text(json.dumps({**LARGE, **names, "hidden_act": "silu", "rms_norm_eps": 1e-6}))
    (python,) = (word.partition("=")[2] for word in overrides if word.startswith("rl.rollout.python="))
    program, model = str(HERE / "own_benchmark.py"), str(directory.parent / "model")
    command = [python, program, model, str(config), *words, str(job["mem_fraction_static"])]
    theirs = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
    print(f"sampled tokens/s {[round(value) for value in ours]}, SGLang's own benchmark {theirs:.0f}")
    if ours[-1] < 0.9 * theirs:
        yield f"samples {ours[-1]:.0f} tokens/s, SGLang's own benchmark {theirs:.0f}"
    for before, line in pairwise(lines):
        seconds = line["time"] - before["time"]
        rest = seconds - line["rollout/seconds"] - line["train/step_seconds"]
        print(f"step {line['step']}: {seconds:.1f} s, without sampling and update {rest / seconds:.1%}")


def measure_steps(directory: Path, overrides: Sequence[str]) -> Iterator[str]:
    """Yield the claims of three steps of Qwen3-4B that do not hold."""
    config = [f"model.config.{key}={json.dumps(value)}" for key, value in LARGE.items()]
    sizes = [
        "data.sequence_length=8192",
        "data.packed=true",
        "train.micro_batch_size=1",
        "rl.evaluation=null",
    ]
    sizes += [
        "rl.rollout.max_completion_length=512",
        f"rl.prompts_per_step={QUESTIONS}",
        "rl.num_generations=8",
        f"train.global_batch_size={QUESTIONS * 8}",
    ]
    sizes += ["rl.warm_start_steps=0", "train.steps=3", "train.log_interval=1", "rl.max_flat_steps=9"]
    # Rewards that differ within a group, whatever a model without training answers.
    reward = HERE / "rewards.py"
    sizes += [
        f'rl.rewards=[{{"kind": "python", "function": "{reward}:alternate"}}]',
        "data.tokenizer=bytes",
    ]
    process = start(directory, [*config, *sizes, *overrides])
    lines = wait_for_lines(directory, 3, process, 500)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # before it writes a checkpoint of 52 GiB
    process.wait()
    time.sleep(20)
    for line in read_metrics(directory):
        print({key: value for key, value in line.items() if "second" in key or key in ("step", "time")})
    print(*directory.with_suffix(".log").read_text().splitlines()[-12:], sep="\n", flush=True)
    if lines < 3:
        yield f"makes {lines} of 3 steps"


def find_processes(words: str, variable: str) -> list[int]:
    """Return the processes with these words in their command lines and this in their environment."""
    numbers = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if words in command and variable in (folder / "environ").read_bytes().decode(errors="replace"):
                numbers.append(int(folder.name))
    return sorted(numbers)


def wait_for_lines(directory: Path, count: int, process: subprocess.Popen[str], seconds: float = 150) -> int:
    """Return the number of lines of metrics when there are `count`, the run has ended, or time is over."""
    deadline = time.monotonic() + seconds
    while len(read_metrics(directory)) < count and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
    return len(read_metrics(directory))


def kill_process(name: str, directory: Path, overrides: Sequence[str]) -> Iterator[str]:
    """Kill a process while the run learns; yield what is left, and whether the same command goes on."""
    overrides = [*overrides, "train.steps=60", "checkpoint.interval=10"]
    process = start(directory, overrides)
    lines = wait_for_lines(directory, 3, process)
    victims = find_processes(*KILLED[name])
    print(f"{name}: {lines} lines, killing {victims[:1]}", flush=True)
    if not victims:
        yield "there is no such process"
        return
    os.kill(victims[0], signal.SIGKILL)
    if name == "server":  # the run starts another one and goes on
        if wait_for_lines(directory, lines + 2, process) < lines + 2:
            yield "the run does not go on without its server"
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    time.sleep(20)
    left = [pid for marks in KILLED.values() for pid in find_processes(*marks)]
    used = read_used_bytes()
    print(f"{name}: left {left}, {used / 2**20:.0f} MiB used, code {process.poll()}", flush=True)
    if left or used > 2**30:
        yield f"{len(left)} processes and {used / 2**20:.0f} MiB are left"
    code, _ = train(directory, overrides)
    print(f"again: code {code}, steps {[line['step'] for line in read_metrics(directory)]}", flush=True)
    if code:
        yield f"the same command ends with {code}"


CASES: dict[str, Callable[[Path, Sequence[str]], Iterator[str]]] = {
    "arithmetic": learn_arithmetic,
    "speed": measure_speed,
    "updates": measure_updates,
    **{f"kill-{name}": partial(kill_process, name) for name in KILLED},
}

if __name__ == "__main__":
    sys.exit(main())
