"""The devices of a node in a batch script: asked for once, and as many as were planned."""

from pathlib import Path

import pytest

from bundle.errors import UsageError
from bundle.launch.job import Job
from bundle.targets.slurm import batch
from bundle.targets.slurm.options import SlurmOptions
from tests.targets.batch_scripts import decided

GPUS, NPUS = ("cuda", "h200", 2, 8), ("ascend", "a3", 1, 4)


def asked(job: Job, *sbatch: str) -> set[str]:
    """The options of a script that ask for devices."""
    lines = batch.build_script(job, SlurmOptions(sbatch=sbatch), Path("/w")).splitlines()
    words = (line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH"))
    return {word for word in words if word.startswith(("gpus", "gres="))}


@pytest.mark.parametrize(
    ("machine", "said", "written"),
    [
        (GPUS, (), {"gpus-per-node=8"}),
        (GPUS, ("gpus-per-node=8",), {"gpus-per-node=8"}),
        (GPUS, ("gpus-per-node=h200:8",), {"gpus-per-node=h200:8"}),
        (GPUS, ("gpus-per-node=h200:6,h100:2",), {"gpus-per-node=h200:6,h100:2"}),
        (GPUS, ("gres=gpu:8",), {"gres=gpu:8"}),
        (GPUS, ("gres=nvme:1,gpu:h200:8",), {"gres=nvme:1,gpu:h200:8"}),
        (GPUS, ("gres=nvme:1",), {"gpus-per-node=8", "gres=nvme:1"}),
        (GPUS, ("gres=gpu:8", "gres=nvme:1"), {"gpus-per-node=8", "gres=nvme:1"}),  # sbatch has the last
        (NPUS, (), {"gres=npu:4"}),
        (NPUS, ("gres=npu:ascend910:4",), {"gres=npu:ascend910:4"}),
        (NPUS, ("gres=nvme:1",), {"gres=npu:4,nvme:1"}),
        (("cuda", "h200", 4, 1), ("gres=gpu",), {"gres=gpu"}),
        (("cpu", "cpu", 2, 2), ("gres=gpu:1", "gpus=2"), {"gres=gpu:1", "gpus=2"}),
    ],
)
def test_the_devices_that_were_planned_are_asked_for_once(machine, said, written):
    assert asked(decided(*machine), *said) == written


@pytest.mark.parametrize(
    ("machine", "said", "why"),
    [
        (GPUS, "gpus-per-node=4", "4 per node, but the job has 8 (--devices-per-node)"),
        (GPUS, "gpus-per-node=h200:16", "16 per node"),
        (GPUS, "gpus-per-node=h200:4,h100:2", "6 per node"),
        (GPUS, "gres=gpu:4", "4 per node"),
        (GPUS, "gres=nvme:8,gpu:h200", "1 per node"),
        (GPUS, "gres=gpu:0", "0 per node"),
        (GPUS, "gpus=4", "gpus-per-node=TYPE:8"),
        (GPUS, "gpus=16", "gpus-per-node=8"),
        (GPUS, "gpus-per-task=8", "gpus-per-node=8"),
        (GPUS, "gpus-per-n=8", "--gpus-per-node"),
        (NPUS, "gres=npu:8", "8 per node, but the job has 4"),
        (NPUS, "gpus=4", "gres=npu:TYPE:4"),
    ],
)
def test_other_devices_are_refused_by_name(machine, said, why):
    with pytest.raises(UsageError) as refused:
        asked(decided(*machine), said, "partition=gpu")
    assert f"--sbatch '{said}': " in str(refused.value) and why in str(refused.value)


def test_every_one_is_refused_at_once():
    with pytest.raises(UsageError) as refused:
        asked(decided(*GPUS), "gres=gpu:4", "gpus=4", "nodes=3")
    assert len(refused.value.violations) == 3
