"""A machine may have Transformer Engine and still train on its cpu."""

import os
import subprocess
import sys

import pytest

from bundle.backends.cpu.facade import hide_gpu_libraries
from bundle.errors import EnvironmentUnfit

PROGRAM = """
from bundle import backends
backends.set_up_runtime("cpu")
import megatron.core.optimizer
from megatron.core.utils import is_te_min_version
print(megatron.core.optimizer.Adam.__module__)
"""


@pytest.mark.parametrize("library", ["transformer_engine", "apex"])
def test_megatron_does_not_find_what_is_for_gpus(library, tmp_path):
    optimizers = {"transformer_engine": "pytorch/optimizers", "apex": "optimizers"}[library]
    package = tmp_path / library
    for name in ("", "pytorch", optimizers):
        (package / name).mkdir(parents=True, exist_ok=True)
        (package / name / "__init__.py").write_text("class FusedAdam: ...\nFusedSGD = FusedAdam\n")
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split()[-1].startswith("torch.optim")


def test_one_that_was_imported_before_is_named(monkeypatch, messages):
    monkeypatch.setitem(sys.modules, "transformer_engine", sys)
    with pytest.raises(EnvironmentUnfit, match="transformer_engine") as error:
        hide_gpu_libraries()
    messages(error.value)
