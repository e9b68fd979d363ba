"""Every size of a layout reaches the process group that is named after it."""

import json
import subprocess
import sys

from bundle.recipe import Parallel

# No two sizes are equal but tp and dp, which differ in what their ranks hold.
SIZES = {"tp": 2, "pp": 3, "vpp": 4, "cp": 5, "ep": 10, "etp": 1}
WORLD = 60


def test_every_size_of_a_recipe_s_layout_is_that_of_its_group() -> None:
    command = [sys.executable, "-m", "tests.mcore.test_groups", json.dumps(SIZES), str(WORLD)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {**SIZES, "dp": 2}


def sizes(layout: Parallel, world: int) -> dict[str, int]:
    """The sizes of the last rank's groups; torch's fake process group has any size and moves nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tests.planning.megatron import ready

    # Megatron makes gloo groups beside the others; a fake group stands for those too.
    real = dist.new_group
    dist.new_group = lambda *args, **keywords: real(*args, **keywords | {"backend": None})  # type: ignore[assignment]
    runtime = ready()
    dist.init_process_group("fake", rank=world - 1, world_size=world, store=FakeStore())
    from bundle.mcore import groups

    with runtime.megatron():
        made = groups.initialize(layout, seed=1, timeout_seconds=60)
    axes = ("tp", "pp", "cp", "ep", "etp", "dp")
    return {"vpp": made.vpp} | {axis: getattr(made, axis).group.size() for axis in axes}


if __name__ == "__main__":
    print(json.dumps(sizes(Parallel(**json.loads(sys.argv[1])), int(sys.argv[2]))))
