"""`mcore-bundle launch kubernetes`: what it prints, in which image, and how long that takes."""

import json
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bundle.environment import image
from bundle.targets import images
from bundle.targets.kubernetes import rayjob
from tests.targets.kubernetes.jobs import read

ASKED = ("demo", "--hardware=h200", "--claim=runs")
RECORD = {"schema": 1, "stack": "cuda-mcore0.16", "revision": "", "inputs": "", "python": "3.12.3"}


def launch(*words: str, form: str = "jobset") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bundle", "launch", "kubernetes", *ASKED, f"--form={form}", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def record(tmp_path) -> str:
    packages = {"megatron-core": "0.16.1", "torch": "2.11.0"}
    file = tmp_path / "image.json"
    file.write_text(json.dumps(RECORD | {"sources": {}, "packages": packages}))
    assert image.named(file).megatron == "0.16.1"
    return str(file)


def test_without_a_name_it_runs_in_the_image_of_ours_for_it(record):
    registry = "--registry=registry.example/team"
    done = launch(f"--image-record={record}", registry, "--set=train.global_batch_size=64")
    assert done.returncode == 0, done.stderr
    _, jobset = read(done.stdout)
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (of_cuda,) = (each for each in images.built() if (each.backend, each.megatron) == ("cuda", "0.16.1"))
    assert pod["containers"][0]["image"] == f"registry.example/team/{of_cuda.tag}"


def test_what_is_in_the_image_must_be_said():
    for said in ((), ("--image-record=none",)):
        done = launch(*said)
        assert done.returncode == 2
        assert "--image-record FILE" in done.stderr and "REGISTRY/cuda:" in done.stderr


def test_a_form_that_no_image_of_ours_can_run_wants_one():
    done = launch("--image-record=none", form="rayjob")
    assert done.returncode == 2
    assert "images of ours have no ray: say --image" in done.stderr


def test_the_ray_that_kuberay_is_told_of_is_the_least_that_the_extra_takes():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    least = rayjob.RAY.removesuffix(".0")
    assert project["project"]["optional-dependencies"]["ray"] == [f"ray[default]>={least}"]


def test_a_thousand_nodes_take_less_than_two_seconds(capsys):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = launch(
        *("--nodes=1024", "--set=train.global_batch_size=65536", "--image=bundle", "--image-record=none"),
        "--dry-run",
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert json.loads(read(done.stdout)[0]["data"]["job.json"])["nodes"] == 1024
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    with capsys.disabled():
        print(f"[{seconds:.2f} s of a processor]", end="")
    assert seconds < 2
