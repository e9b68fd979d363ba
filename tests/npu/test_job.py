"""A job on emulated NPUs through the command line: variables, exit codes, checkpoints, losses of the cpu."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.npu.child import emulated
from tests.npu.emulation import plugin

pytestmark = pytest.mark.npu

LOCAL_PATCH = "mla-without-te-linear"
SMALL = ("train.steps=2", "train.micro_batch_size=1", "train.global_batch_size=4", "train.eval_interval=2",
         "train.eval_batches=1", "model.config.num_hidden_layers=2", "checkpoint.interval=2",
         "train.log_interval=1", "optimizer.warmup_steps=0")  # fmt: skip


def command(folder, *words, npus=True, timeout=1800, **variables):
    """How `mcore-bundle` ended on a machine with emulated NPUs, of which two are visible, or on the cpu."""
    environ = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
    if npus:
        environ |= emulated(str(folder / "plugin"), devices=2) | {"ASCEND_RT_VISIBLE_DEVICES": "0,1"}
    module = "tests.npu.machine" if npus else "bundle"
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *words],
        env=environ | {"PYTHONPATH": environ.get("PYTHONPATH") or str(Path.cwd())} | variables,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def train(folder, name, *words, **options):
    sets = [word for each in SMALL for word in ("--set", each)]
    run = folder / name
    ended = command(folder, "train", "demo", *sets, "--run-directory", str(run), *words, **options)
    return ended, run


def losses(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [[value for name, value in sorted(row.items()) if name.endswith("loss")] for row in rows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("job")
    plugin(made / "plugin")
    return made


def test_the_demo_trains_and_goes_on_in_another_layout(folder):
    cpu, there = train(folder, "cpu", npus=False)
    assert cpu.returncode == 0, cpu.stderr[-3000:]
    npu, here = train(folder, "npu", "--backend", "ascend")
    assert npu.returncode == 0, npu.stderr[-3000:]
    assert losses(here) and len(losses(here)) == len(losses(there))
    for ours, theirs in zip(losses(here), losses(there), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    job = json.loads((here / "job.json").read_text())
    assert job["backend"] == "ascend" and job["environment"]["HCCL_CONNECT_TIMEOUT"] == "1800"


def test_a_plan_says_what_has_met_no_npu(folder):
    said = command(folder, "plan", "demo", "--backend", "ascend")
    assert said.returncode == 0, said.stderr
    assert "910B2C (emulated)" in said.stdout and "emulated NPUs" in said.stdout


def test_too_few_visible_npus_are_the_machines_fault(folder):
    words = ("--backend", "ascend", "--devices-per-node", "2")
    ended, run = train(folder, "few", *words, ASCEND_RT_VISIBLE_DEVICES="0")
    assert ended.returncode == 3 and "devices.per_node: 2" in ended.stderr, ended.stderr
    assert not (run / "job.json").exists()


def test_without_an_npu_a_rank_ends_with_the_environments_code(folder):
    """The machine shows devices that torch-npu then does not see."""
    ended, _ = train(folder, "none", "--backend", "ascend", STAND_IN_DEVICES="0")
    assert ended.returncode == 3 and "sees no NPU" in ended.stderr


def test_a_patch_that_local_layers_need_is_proven_on_what_is_called_emulated(folder):
    said = command(folder, "patches", "verify", LOCAL_PATCH, "--backend", "ascend")
    assert said.returncode == 0, said.stdout + said.stderr[-3000:]
    assert said.stdout.startswith(f"proven on 910B2C (emulated)  {LOCAL_PATCH} ")
