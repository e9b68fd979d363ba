"""`python -m bundle.patched SCRIPT ARGS...`: a program of somebody else, in which the patches are enabled.

Like `python SCRIPT ARGS...`, or `python -m MODULE ARGS...` with -m: the same arguments, `__main__` and search
path. It is no verb of `mcore-bundle`, so that nothing of a command line of ours is in the program's process.
torchrun starts it with `torchrun ... -m bundle.patched SCRIPT ARGS...`.
"""

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from bundle.capabilities.cpu import CPU
from bundle.environment import hardware
from bundle.errors import BundleError, UsageError
from bundle.patches import enable


def run(arguments: Sequence[str]) -> None:
    """Enable the patches and run the program. Raises as `enable`, and whatever the program raises."""
    options = _build_parser().parse_args(arguments)
    sys.argv = [options.script, *options.args]
    if not options.module:
        script = Path(options.script)
        if not script.is_file():
            raise UsageError(f"{options.script}: there is no such file. For a module, use -m")
        if not sys.flags.safe_path:
            sys.path[0] = str(script.resolve().parent)
    enable(
        options.features.split(","),
        vouched=options.vouch,
        allowed=options.allow_drift,
        backend=options.backend,
        strict=options.strict,
    )
    with _start_cpu_emulation() if options.backend == "cpu" else nullcontext():
        if options.module:
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(options.script, run_name="__main__")


def _start_cpu_emulation() -> AbstractContextManager[None]:
    """Return the context in which code that expects GPUs runs on the cpu; prepare the process for it."""
    os.environ.update({variable.name: variable.value for variable in CPU.environment})
    from bundle.backends.cpu import program

    program.start()
    return program.megatron_calls()


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bundle.patched",
        description="Run a program with the patches that its megatron-core needs.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--features", default="", metavar="WORD,...", help="List features that it uses: mtp,cp. Default: any."
    )
    add(
        "--vouch",
        action="append",
        default=[],
        metavar="ID",
        help="Confirm that the program meets what this patch assumes of its caller.",
    )
    add("--allow-drift", action="append", default=[], metavar="ID", help="Continue when this patch drifted.")
    add("--strict", action="store_true", help="Stop at a patch that drifted, also without --features.")
    add(
        "--backend",
        default="auto",
        choices=hardware.BACKEND_CHOICES_WITH_AUTO,
        help="auto detects it; cpu runs what expects GPUs on this machine's CPU. Default: auto.",
    )
    add("-m", dest="module", action="store_true", help="Run SCRIPT as a module, as python -m does.")
    add("script", metavar="SCRIPT", help="The Python file or module to run.")
    add("args", nargs=argparse.REMAINDER, metavar="ARGS", help="The arguments of the program.")
    return parser


def main() -> None:
    """Run the command line; end with a code of `errors.ExitCode`, or as the program does."""
    try:
        run(sys.argv[1:])
    except BundleError as error:
        print(f"bundle.patched: {error}", file=sys.stderr)
        sys.exit(int(error.code))


if __name__ == "__main__":
    main()
