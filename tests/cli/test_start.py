"""What a verb loads before it answers: a busy machine changes seconds, not modules."""

import functools
import re
import subprocess
import sys

import pytest

# Each would cost more than the answer, or is for the workers alone.
HEAVY = {"torch", "megatron", "numpy", "transformers", "pydantic", "rich", "asyncio", "multiprocessing"}


@functools.cache
def loaded(*command: str) -> frozenset[str]:
    """The modules that a Python command imports, as `-X importtime` reports them."""
    ran = subprocess.run([sys.executable, "-X", "importtime", *command], capture_output=True, timeout=60)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return frozenset(re.findall(r"^import time: .*\| +(\S+)$", ran.stderr.decode(), re.MULTILINE))


@pytest.mark.parametrize(
    ("args", "most"),
    [
        ("--help", 10),
        ("patches list", 70),
        ("patches plan --mcore 0.16.1", 65),
        ("patches plan --mcore 0.19.2 --json", 65),
        ("plan demo --mcore 0.16.1", 140),
    ],
)
def test_a_verb_loads_little_more_than_the_command_line_itself(args: str, most: int):
    added = loaded("-m", "bundle", *args.split()) - loaded("-c", "import typer")
    assert not {name.partition(".")[0] for name in added} & HEAVY
    assert len(added) <= most, sorted(added)
