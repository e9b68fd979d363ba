"""Real ranks for tests: a few processes over gloo on this machine that run one module and end together."""

import datetime
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANK, SIZE, STORE = "TEST_WORLD_RANK", "TEST_WORLD_SIZE", "TEST_WORLD_STORE"


def run(
    module: str, size: int, *arguments: str, timeout: float = 120, environ: dict[str, str] | None = None
) -> list[str]:
    """What each of `size` ranks of `python -m module arguments` printed; fails with the errors of any."""
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        shared = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            SIZE: str(size),
            STORE: f"{name}/store",
            **(environ or {}),
        }
        ranks = []
        for rank in range(size):
            with (directory / f"{rank}.out").open("w") as out, (directory / f"{rank}.err").open("w") as err:
                environment = {**shared, RANK: str(rank)}
                ranks.append(subprocess.Popen(command, env=environment, stdout=out, stderr=err))
        _wait(ranks, time.monotonic() + timeout)
        wrong = [
            f"rank {rank} ended with {process.returncode}:\n{(directory / f'{rank}.err').read_text()[-3000:]}"
            for rank, process in enumerate(ranks)
            if process.returncode != 0
        ]
        assert not wrong, "\n".join(wrong)
        return [(directory / f"{rank}.out").read_text() for rank in range(size)]


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> None:
    """Returns when all have ended; ends them when one has failed or time is up."""
    while any(process.poll() is None for process in ranks):
        if any(process.returncode for process in ranks) or time.monotonic() > deadline:
            time.sleep(1)  # the others may be about to say why
            for process in ranks:
                process.kill()
        time.sleep(0.05)


def join(seconds: float = 60) -> int:
    """This process's rank, after all ranks have met; called by the module that `run` runs."""
    import torch.distributed as dist

    rank, size = int(os.environ[RANK]), int(os.environ[SIZE])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ[STORE]}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=seconds),
    )
    return rank
