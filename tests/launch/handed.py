"""Commands of `mcore-bundle` for tests: as a user starts them, in a Python without torch, and as a rank."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.launch.launched import ROOT, reserved

# One rank of a dense model, so that a run takes seconds.
SMALL = (
    "parallel.tp=1", "parallel.sequence_parallel=false", "train.steps=2", "train.log_interval=1",
    "train.eval_interval=0", "train.global_batch_size=2", "train.micro_batch_size=1",
    "data.sequence_length=32", "model.config.num_hidden_layers=2", "optimizer.warmup_steps=0",
    "metrics.tensorboard=false",
)  # fmt: skip


def sets(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def bundle(*words: str, cwd: Path, code: int = 0, seconds: float = 300) -> str:
    """What a command says, which must end with `code`."""
    command = [sys.executable, "-m", "bundle", *words]
    return _ended(subprocess.Popen(command, cwd=cwd, env=_environment(), **_PIPES), code, seconds)  # type: ignore[call-overload]


def without_torch(*words: str, cwd: Path, code: int = 0) -> str:
    """The same where neither torch nor megatron is installed: a directory of links to all other packages."""
    site = cwd / "site-without-torch"
    site.mkdir(exist_ok=True)
    for entry in Path(next(p for p in sys.path if p.endswith("site-packages"))).iterdir():
        if (
            not entry.name.startswith(("torch", "megatron", "__editable__"))
            and not (site / entry.name).exists()
        ):
            (site / entry.name).symlink_to(entry)
    line = "import sys; sys.path[:0] = sys.argv.pop(1).split(':'); from bundle.cli import main; main()"
    command = [sys.executable, "-S", "-c", line, f"{ROOT}:{site}", *words]
    return _ended(subprocess.Popen(command, cwd=cwd, **_PIPES), code, 60)  # type: ignore[call-overload]


def ranks(commands: Sequence[Sequence[str]], cwd: Path, codes: Sequence[int]) -> list[str]:
    """What each of several ranks says that nobody of ours started: torchrun's variables and no launcher."""
    size, started = len(commands), []
    with reserved() as port:
        for rank, words in enumerate(commands):
            told = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
            where = {name: str(value) for name, value in told.items()}
            where |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "bundle", *words]
            started.append(subprocess.Popen(command, cwd=cwd, env=_environment(where), **_PIPES))  # type: ignore[call-overload]
        return [_ended(process, code, 300) for process, code in zip(started, codes, strict=True)]


_PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def _environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""} | dict(more or {})


def _ended(process: subprocess.Popen, code: int, seconds: float) -> str:
    said = str(process.communicate(timeout=seconds)[0])
    assert process.returncode == code, said
    return said
