"""A variable on its way from the recipe to a rank, by every target: what each hands over and starts."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bundle.errors import UsageError
from bundle.files import compute_short_json_digest
from bundle.launch import command, job
from bundle.launch.job import Job, from_plan
from bundle.launch.rendezvous import discover
from bundle.planning import build_plan
from bundle.recipe import load
from bundle.targets import docker, kubernetes, local, ray, slurm
from bundle.targets.kubernetes.options import KubernetesOptions as KubernetesOptions
from bundle.targets.slurm import batch
from bundle.targets.slurm.options import SlurmOptions as SlurmOptions

NAMES = "NCCL_DEBUG: WARN, NCCL_IB_HCA: mlx5, OMP_NUM_THREADS: 4, TORCH_DEVICE_BACKEND_AUTOLOAD: null"


def decided(directory: Path) -> Job:
    recipe = load("demo", ["train.global_batch_size=128", f"environment={{{NAMES}}}"])
    made = build_plan(recipe, backend="cuda", hardware_name="h200", mcore="0.16.1", nodes=2, per_node=8)
    made.raise_gravest_problem()
    return from_plan(made, directory)


def _local(of: Job, folder: Path) -> str:
    name = local.submit(of, local.LocalOptions(python="true"), folder, rendezvous="node0:29500")
    local.wait(name)
    return Path(name, job.FILE_NAME).read_text()


def _docker(of: Job, folder: Path) -> str:
    docker.submit(of, docker.DockerOptions("bundle"), folder, rendezvous="node0:29500")
    return (docker.get_job_directory(of) / job.FILE_NAME).read_text()


def _slurm(of: Job, folder: Path) -> str:
    slurm.submit(of, SlurmOptions(), folder)
    return (batch.get_job_directory(of) / job.FILE_NAME).read_text()


def _kubernetes(of: Job, folder: Path) -> str:
    objects = kubernetes.build_objects(of, KubernetesOptions(image="bundle", claim="runs"))
    return str(next(each["data"][job.FILE_NAME] for each in objects if each["kind"] == "ConfigMap"))


def _ray(of: Job, folder: Path) -> str:
    return ray.write_job_file(of).read_text()


@pytest.mark.parametrize("target", [_local, _docker, _slurm, _kubernetes, _ray])
def test_a_value_of_the_recipe_reaches_the_ranks_of_every_target(
    target: Callable[[Job, Path], str], tmp_path, monkeypatch
):
    # The clients answer, and start nothing.
    for client, answer in (("docker", ""), ("sbatch", "7")):
        (tmp_path / client).write_text(f"#!/bin/sh\necho {answer}\n")
        (tmp_path / client).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    handed = job.parse(target(decided(tmp_path / "run"), tmp_path))
    where = discover({}, nodes=2, node_rank=1, endpoint="node0:29500")
    inherited = {
        "OMP_NUM_THREADS": "16",
        "NCCL_DEBUG": "INFO",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        "A": "b",
    }
    started = command.build_command(job.build_launch(handed, where), inherited).build_environment(inherited)
    wanted = inherited | {
        "OMP_NUM_THREADS": "4",  # what the recipe says yields to nobody
        "NCCL_DEBUG": "WARN",
        "NCCL_IB_HCA": "mlx5",
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    }
    assert started.items() >= wanted.items()


def test_what_only_the_plan_says_of_threads_yields_to_where_ranks_are_started(tmp_path):
    made = build_plan(load("demo"), backend="cpu", hardware_name="cpu", mcore="0.16.1", nodes=1, per_node=2)
    launch = job.build_launch(from_plan(made, tmp_path), discover({}))
    for inherited, threads, interface in (({}, "1", "lo"), ({"OMP_NUM_THREADS": "8"}, "8", "lo")):
        started = command.build_command(launch, inherited).build_environment(inherited)
        assert (started["OMP_NUM_THREADS"], started["GLOO_SOCKET_IFNAME"]) == (threads, interface)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("LD_PRELOAD", "/x.so", "begins with none of NCCL"),
        ("NCCL_NET_PLUGIN", "x", "may contain code"),
        ("CUDA_VISIBLE_DEVICES", "0", "names devices"),
        ("NCCL_DEBUG", "a\nb", "must match"),
    ],
)
def test_a_job_file_sets_no_variable_that_has_code_loaded(tmp_path, name, value, why):
    document = decided(tmp_path).dump()
    document["recipe"]["environment"] = {name: value}
    document["environment"][name] = value
    document["digest"] = compute_short_json_digest({k: v for k, v in document.items() if k != "digest"})
    with pytest.raises(UsageError, match=why):
        job.parse(json.dumps(document))
