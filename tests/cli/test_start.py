"""A verb that needs no torch imports none, nor anything else that is for the workers alone."""

import re
import subprocess
import sys

import pytest

from benchmarks.cli import LIMIT, MEASURE, too_slow

WORKERS = {"torch", "megatron", "numpy", "transformers", "transformer_engine", "torch_npu"}


def loaded(*command: str) -> frozenset[str]:
    """The top modules that a Python command imports, as `-X importtime` reports them."""
    ran = subprocess.run([sys.executable, "-X", "importtime", *command], capture_output=True, timeout=60)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return frozenset(re.findall(r"^import time: .*\| +(\w+)(?:\.\S+)?$", ran.stderr.decode(), re.MULTILINE))


@pytest.mark.parametrize(
    "args",
    [
        "--help",
        "recipes schema",
        "doctor --backend cpu",
        "patches list",
        "patches plan --mcore 0.19.2 --json",
        "patches audit --mcore 0.19.2 --features pp",
        "plan demo --mcore 0.16.1",
        "train demo --dry-run",
    ],
)
def test_a_verb_that_trains_nothing_loads_no_torch(args: str):
    found = loaded("-m", "bundle", *args.split())
    assert "bundle" in found
    assert not found & WORKERS


def test_what_the_measure_can_see():
    assert "torch" in loaded("-c", "import torch")


def test_the_benchmark_names_a_verb_that_takes_too_long():
    taken = {"python -c pass": 0.02, MEASURE: 0.1, "mcore-bundle doctor": 0.1 * LIMIT}
    assert too_slow(taken) == []
    (line,) = too_slow({**taken, "mcore-bundle --help": 0.11 * LIMIT})
    assert line.startswith("mcore-bundle --help: 2.75 times")
