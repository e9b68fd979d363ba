"""Whole recipes through every launcher, for machines that are not here: what each is told of one job."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bundle.launch import job as job_file
from bundle.launch.job import Job, from_plan
from bundle.planning import build_plan
from bundle.recipe import load
from bundle.targets import docker, kubernetes, local, ray
from bundle.targets.kubernetes.options import KubernetesOptions as KubernetesOptions
from bundle.targets.slurm import batch
from bundle.targets.slurm.options import SlurmOptions as SlurmOptions
from tests.targets.kubernetes.jobs import pods
from tests.vision import rows

WORK = Path("/work")
BATCH = "train.global_batch_size=256"
MTP, EIGHT = ("demo", BATCH), ("model.dtype=bf16", "model.fp8={scaling: blockwise}")
SEEING = (str(rows.RECIPE), BATCH, "train.micro_batch_size=1")
H200, A3 = ("cuda", "h200", 8), ("ascend", "a3", 16)
CASES = {
    "MTP and FP8 on H200": ((*MTP, *EIGHT), H200, {"mtp", "fp8"}),
    "MTP on A3": (MTP, A3, {"mtp"}),
    "images on H200": (SEEING, H200, {"multimodal"}),
    "images on A3": (SEEING, A3, {"multimodal"}),
}


@pytest.fixture(scope="module", params=CASES)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    (recipe, *overrides), (backend, hardware, per_node), features = CASES[request.param]
    asked = load(recipe, overrides)
    made = build_plan(
        asked, backend=backend, hardware_name=hardware, mcore="0.16.1", nodes=2, per_node=per_node
    )
    made.raise_gravest_problem()
    assert features <= made.recipe.features
    return from_plan(made, tmp_path_factory.mktemp("runs") / "run")


Told = list[tuple[int, list[str]]]  # of both nodes: their devices, what they are told


def of_local(job: Job) -> Told:
    commands = [
        local.build_node_command(job, local.LocalOptions(), WORK, node, "node0:29500") for node in range(2)
    ]
    return [(job.per_node, told(shlex.split(command.to_redacted_shell()))) for command in commands]


def of_docker(job: Job) -> Told:
    found = []
    for node in range(2):
        words = shlex.split(
            docker.build_node_command(
                job, docker.DockerOptions("bundle"), WORK, node, "node0:29500"
            ).to_redacted_shell()
        )
        gpus = [word.partition("=")[2] for word in words if word.startswith("--gpus=")]
        npus = [word for word in words if re.fullmatch(r"--device=/dev/davinci\d+", word)]
        found.append((int(gpus[0]) if gpus else len(npus), told(words)))
    return found


def of_slurm(job: Job) -> Told:
    script = batch.build_script(job, SlurmOptions(), WORK)
    said = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script, re.MULTILINE))
    assert (said["nodes"], said["ntasks-per-node"]) == ("2", "1")
    count = said["gpus-per-node"] if job.backend == "cuda" else said["gres"].removeprefix("npu:")
    (step,) = (line for line in script.splitlines() if line.startswith("srun "))
    return [(int(count), told(shlex.split(step.removesuffix(" &"))))] * 2


def of_ray(job: Job) -> Told:
    asked = json.loads(ray.render_dry_run(job, ray.RayOptions("http://head:8265"), WORK))
    name, placement = {"cuda": "GPU", "ascend": "NPU"}[job.backend], asked["placement"]
    words = shlex.split(asked["entrypoint"])
    (file,) = (word for word in words if word.startswith("--job="))
    driven = [
        list(job_file.build_train_arguments(job, Path(file.partition("=")[2]), n, "node0:29500"))
        for n in range(2)
    ]
    assert (placement["strategy"], placement["bundles"]) == ("STRICT_SPREAD", 2)
    return [(int(placement["each"][name]), words) for words in driven]


def told(words: list[str]) -> list[str]:
    """What a node's own command is told, without what starts it."""
    return words[words.index("train") :]


@pytest.mark.parametrize("launcher", [of_local, of_docker, of_slurm, of_ray])
def test_every_launcher_asks_for_the_devices_of_the_plan_and_executes_its_file(
    job: Job, launcher: Callable[[Job], Told]
):
    placed = {
        of_docker: docker.get_job_directory,
        of_slurm: batch.get_job_directory,
        of_ray: ray.get_job_directory,
    }
    folder = placed[launcher](job) if launcher in placed else WORK  # on this machine, where one says
    file = f"--job={folder / job_file.FILE_NAME}"
    for node, (devices, words) in enumerate(launcher(job)):
        assert devices == job.per_node
        assert words[:2] == ["train", file]
        # Slurm tells each task itself which node it is.
        where = ["--nodes=2", f"--node-rank={node}", "--rendezvous=node0:29500"]
        assert words[2:] == ([] if launcher is of_slurm else where)


@pytest.mark.parametrize("form", kubernetes.FORMS_BY_NAME)
def test_every_form_of_kubernetes_asks_for_them_and_hands_the_file_over(job, form):
    if (only := kubernetes.FORMS_BY_NAME[form].backends) and job.backend not in only:
        pytest.skip(f"{form} is for {only}")
    options = KubernetesOptions(image="bundle", claim="runs", form=form)
    objects: Any = kubernetes.build_objects(job, options)
    assert objects[0]["data"][job_file.FILE_NAME] == job.to_text()
    device = {"cuda": "nvidia.com/gpu", "ascend": "huawei.com/Ascend910"}[job.backend]
    found = pods(objects)
    assert sum(count for count, _ in found) == 2
    for _, template in found:
        (container,) = template["spec"]["containers"]
        assert container["resources"]["limits"] == {device: str(job.per_node)}
