"""Measurements: one leaves a process behind, as megatron's writers of checkpoints do to 0.15; one waits."""

import os
import subprocess
import sys
import time
from pathlib import Path

from bundle.verification.numbers import Bench


def process(bench: Bench) -> float:
    """The number of the process."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def nothing(bench: Bench) -> float:
    """Zero, at once."""
    return 0.0


def wait(bench: Bench) -> float:
    """Zero, when there is the file that $BUNDLE_TEST_WAITS_FOR names."""
    while not Path(os.environ["BUNDLE_TEST_WAITS_FOR"]).exists():
        time.sleep(0.02)
    return 0.0
