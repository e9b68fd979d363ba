"""A patch that is put on once more for every model: verl's MTP patches are (1dda039b9, mtp_patch, patch).

Each engine that is made wraps what the one before has wrapped, and taking the patch off once leaves the
others on.
"""

import json
import subprocess
import sys

import pytest

COUNTED = """
import json
from bundle import backends
from bundle.patches import applying
from bundle.verification.verifying import decide, everything

plan = everything(decide("cpu"))
applying.apply(plan)
backends.prepare("cpu")
from bundle.wrappers.mtp import only_with_labels
from megatron.core.models.gpt.gpt_model import GPTModel

def depth(function):
    return 1 + depth(function.__wrapped__) if hasattr(function, "__wrapped__") else 0

counted = [sum(step.target == "megatron.core.models.gpt.gpt_model:GPTModel.forward" for step in plan.steps)]
counted.append(depth(GPTModel.forward))
for _ in range(2):
    applying.apply(plan)
counted.append(depth(GPTModel.forward))
for _ in range(2):
    GPTModel.forward = only_with_labels(GPTModel.forward)
counted.append(depth(GPTModel.forward))
print(json.dumps(counted))
"""


def test_a_patch_is_put_on_once_however_many_engines_are_made():
    pytest.importorskip("megatron.core")
    ran = subprocess.run([sys.executable, "-c", COUNTED], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    meant, once, again, naive = json.loads(ran.stdout.splitlines()[-1])
    assert naive == again + 2  # put on for each of two engines
    assert again == once == meant > 0
