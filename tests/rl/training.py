"""Ranks that train a small policy in a layout: python -m tests.rl.training DIRECTORY JSON.

JSON: {name: {"parallel": {...}, "overrides": {key: value}, "error": TEXT}}. Each run lies in DIRECTORY/name.
One that ends with an error that begins with TEXT leaves its code in DIRECTORY/name.code. One that the plan
refuses leaves the reasons in DIRECTORY/name.refused.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bundle import backends
from bundle.errors import BundleError
from bundle.launch import Start
from bundle.launch import job as job_file
from bundle.planning import build_plan
from bundle.recipe import load
from tests.ranks import start_rank

SMALL = {
    "model.config.hidden_size": 32,
    "model.config.intermediate_size": 48,
    "rl.prompts_per_step": 8,
    "rl.num_generations": 4,
    "rl.warm_start_steps": 2,
    "rl.evaluation.interval": 3,
    "rl.rollout.max_completion_length": 5,
    "rl.rollout.temperature": 0.8,
    "rl.loss.entropy": 0.01,
    # Answers of an untrained model are never right: this reward tells them apart.
    "rl.rewards": "[{kind: python, function: FILE:count_digits}, {kind: exact, field: answer}]",
    "train.global_batch_size": 32,
    "train.micro_batch_size": 4,
    "train.steps": 8,
    "train.log_interval": 1,
    "checkpoint.interval": 0,
    "metrics.tensorboard": "false",
    "optimizer.lr": 0.003,
}
REWARD = """
def count_digits(answers, rows):
    return [sum(c.isdigit() or c in "aeiou" for c in answer) + 0.1 * len(answer) for answer in answers]


def fail_on_some(answers, rows):
    return [float("nan") if number % 4 == 0 else len(answer) for number, answer in enumerate(answers)]


def like_all(answers, rows):
    return [1.0] * len(answers)
"""


def main(directory: Path, cases: dict[str, dict[str, Any]]) -> None:
    _, rank = start_rank()
    reward = directory / "reward.py"
    if rank == 0:
        reward.write_text(REWARD)
    dist.barrier()
    from bundle.distributed.watchdog import Watchdog

    for name, case in cases.items():
        values = (
            SMALL
            | case.get("overrides", {})
            | {f"parallel.{key}": value for key, value in case.get("parallel", {}).items()}
        )
        overrides = [f"{key}={value}".replace("FILE", str(reward)) for key, value in values.items()]
        recipe = load(case.get("recipe", "grpo-arithmetic-cpu"), overrides)
        plan = build_plan(recipe, backend="cpu", per_node=dist.get_world_size())
        if plan.problems:  # a release that cannot do this
            (directory / f"{name}.refused").write_text("\n".join(problem.text for problem in plan.problems))
            continue
        job = job_file.from_plan(plan, directory / name, start=Start())
        assert job.patches is not None
        runtime = backends.set_up_runtime("cpu", recipe)
        from bundle.mcore import groups
        from bundle.rl import trainer

        with Watchdog(600, directory, rank, rank) as dog:
            try:
                trainer.run(job, runtime, torch.device("cpu"), dog)
            except BundleError as error:
                if "error" not in case:
                    raise
                assert str(error).startswith(case["error"]), error
                (directory / f"{name}.code").write_text(str(int(error.code)))
        groups.destroy_model_parallel_groups()
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
