"""Every size of a layout reaches the process group of its name; random states differ along them."""

import hashlib
import json
import subprocess
import sys
from itertools import product
from typing import Any

import pytest

from bundle.recipe import Parallel

# No two sizes are equal but tp and dp, which differ in what their ranks hold.
SIZES = {"tp": 2, "pp": 3, "vpp": 4, "cp": 5, "ep": 10, "etp": 1}
WORLD = 60


STAGES, STEPS = range(SIZES["pp"]), (0, 1, 2, 200)


@pytest.fixture(scope="module")
def last_rank() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.mcore.test_groups", json.dumps(SIZES), str(WORLD)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_size_of_a_recipe_s_layout_is_that_of_its_group(last_rank):
    assert last_rank["sizes"] == {**SIZES, "dp": 2}


def test_random_states_differ_by_seed_stage_and_step_that_a_run_goes_on_after(last_rank):
    """And between the kinds of parallel region; the same three give the same states."""
    drawn = last_rank["drawn"]
    assert drawn == last_rank["drawn again"] and len(drawn) == 2 * len(STAGES) * len(STEPS)
    every = [of for states in drawn for of in states.values()]
    assert len(drawn[0]) > 1 and len(set(every)) == len(every)


def drawn() -> list[dict[str, str]]:
    """Return digests of what each generator draws first, for every seed, stage and step."""
    import torch
    from megatron.core import parallel_state, tensor_parallel

    from bundle.mcore import groups

    found = []
    for seed, stage, after in product((1, 2), STAGES, STEPS):
        parallel_state.set_pipeline_model_parallel_rank(stage)
        groups.seed_model_parallel_rng(seed, completed_steps=after)
        tracker, values = tensor_parallel.get_cuda_rng_tracker(), {}
        for name in groups.get_rng_tracker_states():
            with tracker.fork(name):
                values[name] = hashlib.sha256(torch.rand(64).numpy().tobytes()).hexdigest()
        found.append(values)
    return found


def describe_last_rank(layout: Parallel, world: int) -> dict[str, Any]:
    """Return the sizes of its groups and what it draws; torch's fake process group moves nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tests.planning.megatron import ready

    # Megatron makes gloo groups beside the others; a fake group stands for those too.
    real = dist.new_group
    dist.new_group = lambda *args, **keywords: real(*args, **keywords | {"backend": None})  # type: ignore[assignment]
    runtime = ready()
    dist.init_process_group("fake", rank=world - 1, world_size=world, store=FakeStore())
    from bundle.mcore import groups

    with runtime.megatron_calls():
        made = groups.create_model_parallel_groups(layout, seed=1, timeout_seconds=60)
        random = {"drawn": drawn(), "drawn again": drawn()}
    axes = ("tp", "pp", "cp", "ep", "etp", "dp")
    return random | {"sizes": {"vpp": made.vpp} | {axis: getattr(made, axis).group.size() for axis in axes}}


if __name__ == "__main__":
    print(json.dumps(describe_last_rank(Parallel(**json.loads(sys.argv[1])), int(sys.argv[2]))))
