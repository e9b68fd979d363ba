"""Launches of two ranks in a process of their own, as a user starts them, and what becomes of them."""

import os
import subprocess
import sys
import time
from pathlib import Path

from bundle.launch import outcomes

ROOT = Path(__file__).parents[2]


def start(folder: Path, module: str, *arguments: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tests.launch.starter", "logs", module, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def finish(starter: subprocess.Popen, code: int, seconds: float = 60) -> tuple[str, str]:
    out, err = starter.communicate(timeout=seconds)
    assert starter.returncode == code, err
    return out, err


def wait_until_ready(folder: Path) -> list[int]:
    deadline = time.monotonic() + 60
    while len(list(folder.glob("ready-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [outcome.pid for outcome in outcomes.read(folder / "logs")]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pids: list[int], seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))
