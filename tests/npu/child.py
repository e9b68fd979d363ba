"""A process of its own for each look at torch-npu: the order of imports counts, and a refusal may end it.

A World forks ranks of a process that has imported torch, which is too late for both.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    out: str
    err: str


def chip(devices: int) -> dict[str, str]:
    """The variables by which the stand-in libraries have so many devices."""
    return {
        "STAND_IN_DEVICES": str(devices),
        "STAND_IN_SOC": "Ascend910B3",
        "TASK_QUEUE_ENABLE": "0",  # a refusal in the queue's own thread would end the process
    }


DEVICES = 4


def emulated(plugin: str, devices: int = DEVICES) -> dict[str, str]:
    """The variables of a process whose NPUs compute: see tests.npu.emulation."""
    return {
        "LD_LIBRARY_PATH": os.environ["STAND_IN_LIBRARIES"],
        "PYTHONPATH": os.pathsep.join([plugin, str(Path.cwd()), os.environ.get("PYTHONPATH", "")]),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        **chip(devices),
    }


def child(
    program: str,
    *arguments: str,
    devices: int = 2,
    libraries: bool = True,
    autoload: bool = True,
    path: Sequence[str] = (),
    timeout: float = 1800,
) -> Ended:
    """Runs a program text with the stand-in libraries, or without; `path` goes in front of sys.path."""
    environ = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    environ |= {
        "PYTHONPATH": os.pathsep.join([*path, str(Path.cwd()), os.environ.get("PYTHONPATH", "")]),
        **chip(devices),
    }
    if libraries:
        environ["LD_LIBRARY_PATH"] = os.environ["STAND_IN_LIBRARIES"]
    if not autoload:
        environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    return ended(["-c", program, *arguments], environ, timeout)


def ended(words: Sequence[str], environ: Mapping[str, str], timeout: float = 1800) -> Ended:
    """How this python ended with these words and variables."""
    command = [sys.executable, "-W", "ignore", *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout)
    return Ended(done.returncode, done.stdout, done.stderr)


def answer(program: str, *arguments: str, **options) -> str:
    """The last line that the program printed; fails with its errors."""
    ended = child(program, *arguments, **options)
    assert ended.code == 0, ended.err[-4000:]
    return ended.out.splitlines()[-1]
