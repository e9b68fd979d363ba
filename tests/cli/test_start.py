"""A verb that needs no torch imports none, nor anything else that is for the workers alone."""

import re
import subprocess
import sys

import pytest

from benchmarks.cli import LIMIT, MEASURE, too_slow

pytestmark = pytest.mark.processes

WORKERS = {"torch", "megatron", "numpy", "transformers", "transformer_engine", "torch_npu"}


def modules(*command: str) -> frozenset[str]:
    """The modules that a Python command imports, as `-X importtime` reports them."""
    ran = subprocess.run([sys.executable, "-X", "importtime", *command], capture_output=True, timeout=60)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return frozenset(re.findall(r"^import time: .*\| +(\S+)$", ran.stderr.decode(), re.MULTILINE))


def loaded(*command: str) -> frozenset[str]:
    """The top modules of those."""
    return frozenset(module.partition(".")[0] for module in modules(*command))


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
        "tune demo --mcore 0.16.1",
        "train demo --dry-run",
    ],
)
def test_a_verb_that_trains_nothing_loads_no_torch(args: str):
    found = loaded("-m", "bundle", *args.split())
    assert "bundle" in found
    assert not found & WORKERS


@pytest.mark.parametrize("args", ["doctor --backend cpu", "patches plan --mcore 0.19.2", "plan demo"])
def test_a_verb_that_patches_nothing_loads_nothing_that_applies_patches(args: str):
    found = modules("-m", "bundle", *args.split())
    assert "bundle.patches" in found
    assert not found & {"bundle.patches.patcher", "bundle.patches.frameworks", "bundle.patches.audit"}


@pytest.mark.parametrize("args", ["doctor --backend cpu", "patches list", "patches plan --mcore 0.19.2"])
def test_a_verb_without_a_recipe_loads_nothing_that_reads_recipes(args: str):
    found = modules("-m", "bundle", *args.split())
    assert "bundle.cli.options" in found
    assert not found & {"bundle.recipe", "bundle.architectures", "ruamel.yaml"}


def test_a_verb_that_starts_no_rank_loads_nothing_that_watches_ranks():
    found = modules("-m", "bundle", "plan", "demo")
    assert "bundle.launch.command" in found
    assert not found & {
        f"bundle.launch.{name}" for name in ("job", "process", "verdict", "evidence", "hang", "causes")
    }


def test_one_validator_makes_every_section_of_a_recipe():
    program = (
        "from bundle.recipe import load, section, sections; made = load('demo'); "
        "assert isinstance(made.optimizer, sections.Optimizer); "
        "every = section.Section.__subclasses__() + section.DerivedDefaultsSection.__subclasses__(); "
        "print([of.__name__ for of in every if of.__pydantic_complete__])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "['Recipe']\n", ran.stderr[-2000:]


def test_no_collection_looks_through_what_the_import_of_a_verb_makes():
    program = (
        "import gc, bundle.cli; group = bundle.cli.typer.main.get_command(bundle.cli.app); seen = []; "
        "gc.callbacks.append(lambda phase, info: seen.append(phase)); group.get_command(None, 'plan'); "
        "gc.callbacks.clear(); from bundle.cli.plan import plan; "
        "print(len(seen) < 10, any(each is plan for each in gc.get_objects()), gc.isenabled())"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "True False True\n", ran.stderr[-2000:]


def test_what_the_measure_can_see():
    assert "torch" in loaded("-c", "import torch")


def test_the_benchmark_names_a_verb_that_takes_too_long():
    taken = {"python -c pass": 0.02, MEASURE: 0.1, "mcore-bundle doctor": 0.1 * LIMIT}
    assert too_slow(taken) == []
    slow = "mcore-bundle --help"
    (line,) = too_slow({**taken, slow: 0.11 * LIMIT})
    assert line.startswith(f"{slow}: 2.75 ")
