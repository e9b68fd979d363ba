"""The command line as a user starts it: a process of its own, with the package of this checkout.

`call_bundle` and `capture_bundle` run a verb in this process: a second interpreter would take too long.
"""

import io
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from bundle import cli
from bundle.errors import BundleError

ROOT = Path(__file__).parents[1]
NO_GPU = MappingProxyType({"CUDA_VISIBLE_DEVICES": ""})
# One rank of a dense model, so that a run takes seconds.
SMALL = (
    "parallel.tp=1", "parallel.sequence_parallel=false", "train.steps=2", "train.log_interval=1",
    "train.eval_interval=0", "train.global_batch_size=2", "train.micro_batch_size=1",
    "data.sequence_length=32", "model.config.num_hidden_layers=2", "optimizer.warmup_steps=0",
    "metrics.tensorboard=false",
)  # fmt: skip


def sets(*overrides: str) -> list[str]:
    """Return the words that override keys of a recipe."""
    return [word for override in overrides for word in ("--set", override)]


def start_bundle(
    *words: str | Path,
    cwd: Path | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    base: Mapping[str, str] = os.environ,
    program: Sequence[str | Path] = ("-m", "bundle"),
    within: Sequence[str | Path] = (),
    **streams: Any,
) -> subprocess.Popen[str]:
    """Start `mcore-bundle WORDS`, whose output is text in pipes if `streams` (of Popen) do not say otherwise.

    `environment` is added to `base`, and the checkout comes first in PYTHONPATH. `program` is what Python
    runs, `within` the words of a command that runs all of it.
    """
    variables = {**base, **environment}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [variables.get("PYTHONPATH")])])
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    command = [*map(str, within), sys.executable, *map(str, (*program, *words))]
    return subprocess.Popen(command, cwd=cwd, env=variables, text=True, **streams)


def start_training(
    recipe: str | Path, directory: Path, overrides: Iterable[str], *flags: str, **options: Any
) -> subprocess.Popen[str]:
    """Start `train RECIPE` in `directory`; `options` are those of `start_bundle`."""
    words = ("train", recipe, "--run-directory", directory, *sets(*overrides), *flags)
    return start_bundle(*words, cwd=ROOT, **options)


def finish(process: subprocess.Popen[str], code: int = 0, timeout: float = 500) -> str:
    """Return what a process printed, which must end with `code`; it is killed where it does not end."""
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    printed = (out or "") + (err or "")
    assert process.returncode == code, printed
    return printed


def run_bundle(
    *words: str | Path, code: int | None = None, timeout: float = 300, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Return how `mcore-bundle WORDS` ended, which fails on another `code`; `options`: of `start_bundle`."""
    with start_bundle(*words, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
    assert code is None or process.returncode == code, f"{out}{err}"
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def run_without_torch(*words: str | Path, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """The same without torch and megatron installed: in `cwd`, a directory of links to all other packages."""
    site = cwd / "site-without-torch"
    site.mkdir(exist_ok=True)
    for entry in Path(next(path for path in sys.path if path.endswith("site-packages"))).iterdir():
        hidden = entry.name.startswith(("torch", "megatron", "__editable__"))
        if not hidden and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    line = "import sys; sys.path[:0] = sys.argv.pop(1).split(':'); from bundle.cli import main; main()"
    program = ("-S", "-c", line, f"{ROOT}:{site}")
    return run_bundle(*words, cwd=cwd, code=code, timeout=60, program=program)


def call_bundle(*words: str | Path) -> int:
    """Return the exit code of `mcore-bundle WORDS` in this process, whose own streams get its output."""
    with patch.object(sys, "argv", ["mcore-bundle", *map(str, words)]):
        try:
            cli.main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def capture_bundle(*words: str) -> tuple[int, str]:
    """Return the exit code and all that is printed, as `main` ends; any other exception is the test's."""
    written, code = io.BytesIO(), 0
    with io.TextIOWrapper(written, "utf-8", "backslashreplace", write_through=True) as stream:
        with redirect_stdout(stream), redirect_stderr(stream):
            try:
                cli.app(list(words), prog_name="mcore-bundle")
            except BundleError as error:
                print(f"mcore-bundle: {error}")
                code = int(error.code)
            except SystemExit as end:
                code = int(end.code or 0)
        return code, written.getvalue().decode()
