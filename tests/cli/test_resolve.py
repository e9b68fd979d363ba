"""`mcore-bundle resolve` as a user meets it: what it prints is a file for pip, or nothing."""

import json
import subprocess

import pytest
from packaging.requirements import Requirement

from tests.command import run_bundle


def resolve(*args: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from bundle.cli import main; main()"
    after = (
        "import atexit, sys; atexit.register(lambda: sys.stderr.write(f\"torch {'torch' in sys.modules}\"))\n"
    )
    return run_bundle("resolve", *args, program=("-c", after + program))


def requirements(text: str) -> dict[str, str]:
    """A constraints file as pip reads it."""
    lines = [line.partition(" #")[0].strip() for line in text.splitlines() if not line.startswith("#")]
    return {found.name: str(found.specifier) for found in map(Requirement, lines)}


@pytest.mark.parametrize("minor", ["0.12", "0.16", "0.19"])
def test_constraints_pin_one_release_of_what_was_asked_for(minor: str):
    ran = resolve("--mcore", minor, "--backend", "cpu")
    assert (ran.returncode, ran.stderr) == (0, "torch False")
    pins = requirements(ran.stdout)
    assert pins["megatron-core"].startswith(f"=={minor}.") and pins["torch"].startswith("==")
    assert all("  # " in line for line in ran.stdout.splitlines() if not line.startswith("#"))


def test_what_an_image_pins_otherwise_and_nobody_ran_is_told():
    said = resolve("--mcore", "0.16.1", "--backend", "cuda").stdout
    assert "asked for" in said and "cuda-mcore0.16" in said
    assert requirements(said)["transformer-engine"] == "==2.14.1"


def test_what_was_never_seen_together_prints_no_constraints_and_names_the_nearest():
    ran = resolve("--mcore", "0.17", "--backend", "cuda")
    assert (ran.returncode, ran.stdout) == (3, "")
    first, nearest, *others = ran.stderr.splitlines()
    assert "megatron-core 0.17 " in first
    assert nearest.startswith("  - cuda: megatron-core 0.16.1, ")
    assert any(line.startswith("  - cpu: megatron-core 0.17.1, ") for line in others)


def test_json_says_the_same():
    found = json.loads(resolve("--mcore", "0.16", "--backend", "cuda", "--json").stdout)
    pins = {pin["package"]: pin["version"] for pin in found["pins"]}
    assert pins["megatron-core"] == "0.16.1" and all(pin["reason"] for pin in found["pins"])
    assert found["found"]["device"] == "NVIDIA H200" and found["also"]
    ran = resolve("--mcore", "0.17", "--backend", "cuda", "--json")
    never = json.loads(ran.stdout)
    assert ran.returncode == 3 and never["found"] is None and not never["pins"] and never["nearest"]


def test_what_ran_on_stand_ins_says_so():
    assert "# emulated: " in resolve("--backend", "ascend").stdout


@pytest.mark.parametrize("args", [("--backend", "rocm"), ("--mcore", "new", "--backend", "cpu")])
def test_what_is_none_is_a_usage_error(args: tuple[str, ...]):
    assert resolve(*args).returncode == 2
