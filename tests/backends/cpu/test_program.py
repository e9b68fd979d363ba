"""A whole program that expects GPUs, run on the cpu: what it sees of torch and of megatron."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, tempfile
import torch
import torch.distributed as dist
assert torch.cuda.is_available() and torch.cuda.device_count() == 2
torch.cuda.set_device(1)
dist.init_process_group("nccl", f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1,
                        device_id=torch.device("cuda:1"))
group = dist.new_group([0], backend="nccl")
assert dist.get_backend() == dist.get_backend(group) == "gloo"
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
parallel_state.initialize_model_parallel()
layer = get_gpt_layer_local_spec().submodules
attention = layer.self_attention.submodules.core_attention
assert attention.__module__ == "bundle.backends.cpu.attention", attention
norm = layer.input_layernorm
norm = getattr(norm, "func", norm)
assert norm.__module__ == "bundle.backends.local", norm
total = torch.ones(2, device="cuda")
dist.all_reduce(total)
print(total.device, sys.modules["transformer_engine"])
"""


@pytest.mark.slow
def test_what_expects_gpus_runs(tmp_path: Path):
    pytest.importorskip("megatron.core")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "bundle.patched", "--backend", "cpu", str(script)],
        capture_output=True,
        text=True,
        timeout=600,
        env={"PATH": "", "LOCAL_WORLD_SIZE": "2"},
    )
    assert ran.stdout == "cpu None\n", ran.stdout + ran.stderr
