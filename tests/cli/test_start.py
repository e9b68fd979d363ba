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
        ("patches list", 75),
        ("patches plan --mcore 0.16.1", 70),
        ("patches plan --mcore 0.19.2 --json", 70),
        ("plan demo --mcore 0.16.1", 157),
    ],
)
def test_a_verb_loads_little_more_than_the_command_line_itself(args: str, most: int):
    added = loaded("-m", "bundle", *args.split()) - loaded("-c", "import typer")
    assert not {name.partition(".")[0] for name in added} & HEAVY
    assert len(added) <= most, sorted(added)


def test_the_list_of_verbs_is_printed_without_typer():
    added = {name.partition(".")[0] for name in loaded("-m", "bundle", "--help")}
    assert not added & {"typer", "dataclasses", "inspect", *HEAVY}


# Which classes a verb makes, by who makes them: a frozen dataclass costs four times what `frozen` does.
CLASSES = """
import atexit, sys
from bundle.cli import main
sys.argv = ["mcore-bundle", *sys.argv[1:]]
made = lambda: (
    f"{module}.{name}"
    for module in list(sys.modules) if module.startswith("bundle.")
    for name, kind in vars(sys.modules[module]).items()
    if isinstance(kind, type) and kind.__module__ == module
    and getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)
)
atexit.register(lambda: print(*made(), file=sys.stderr))
main()
"""


@pytest.mark.parametrize("args", ["doctor --backend cpu", "patches list", "patches plan", "plan demo"])
def test_the_values_of_a_verb_are_made_by_frozen(args: str):
    ran = subprocess.run([sys.executable, "-c", CLASSES, *args.split()], capture_output=True, timeout=60)
    assert ran.stdout, ran.stderr.decode()
    assert not ran.stderr.split(), ran.stderr.decode()
