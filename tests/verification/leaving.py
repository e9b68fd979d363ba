"""Measurements: one leaves a process behind, as megatron's writers do to 0.15; others wait, or err."""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist

from bundle.verification.measurements import collectives
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


def wrong_sum(bench: Bench) -> float:
    """The collectives, of which a sum puts one too many into the last place."""
    right = dist.all_reduce

    def wrong(x, *arguments):
        right(x, *arguments)
        if not arguments:
            x[-1] += 1

    dist.all_reduce = wrong
    return collectives.require_exact_collective_results(bench)
