"""Which weights a rank counts in the gradient norm: megatron's own layers over a stand-in (a contract).

On two GPUs `patches verify` proves the same of the norm itself.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from bundle.patches.catalogue import PATCHES as CATALOGUE

PATCHES = ("cuda-norm-of-whole-weights", "cuda-norm-of-expert-weights")


def marks(tree: Path, *ids: str) -> dict[str, object]:
    """What `tests.replacements.marks` finds in a release."""
    if find_spec("torch") is None:
        pytest.skip("could not import 'torch': it is not installed")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), str(tree)])}
    command = [sys.executable, "-m", "tests.replacements.marks", *ids]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, object] = json.loads(ran.stdout.splitlines()[-1])
    return found


def right(found: dict[str, object]) -> list[str]:
    """The layers whose marks say what their weights are."""
    experts = [True, True]
    wanted = {"linear duplicated": False, "experts column": experts, "experts row": experts}
    return [name for name, value in wanted.items() if found[name] == value]


@pytest.mark.slow
def test_the_default_release_marks_both_wrongly_and_the_patches_mend_it(release):
    tree = release("0.16.1")
    assert not right(marks(tree))
    patched = marks(tree, *PATCHES)
    assert len(right(patched)) == 3
    assert patched["linear None"] is True  # as Transformer Engine left it


def test_all_patches_of_a_gpu_stand_beside_one_another(release):
    """Whatever imports what: wrappers are loaded while the modules that they replace something in are."""
    every = [patch.id for patch in CATALOGUE if "cuda" in patch.backends]
    assert len(right(marks(release("0.16.1"), *every))) == 3


@pytest.mark.matrix
@pytest.mark.parametrize("version", ["0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.17.1", "0.18.2", "0.19.2"])
def test_every_other_release_marks_both_rightly_with_what_it_needs(version, release):
    assert len(right(marks(release(version), *PATCHES))) == 3
