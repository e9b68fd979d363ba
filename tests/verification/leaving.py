"""A measurement that leaves a process behind, as megatron's writers of checkpoints do to 0.15."""

import subprocess
import sys

from bundle.verification.bench import Bench


def process(bench: Bench) -> float:
    """The number of the process."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
