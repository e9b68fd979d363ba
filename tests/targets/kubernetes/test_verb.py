"""`mcore-bundle launch kubernetes`: what it prints, in which image, and how long that takes."""

import json
import os
import resource
import subprocess
import tomllib
from pathlib import Path

import pytest

from bundle.environment import image
from bundle.launch.job import UNDECIDED, parse
from bundle.targets import images
from bundle.targets.kubernetes import FORMS_BY_NAME, rayjob
from bundle.targets.kubernetes.options import DEFAULT_CLAIM
from tests.command import run_bundle
from tests.launch.launched import ROOT
from tests.targets.kubernetes.jobs import pods, read
from tests.targets.stderr import drop_times
from tests.targets.test_mounts import MODEL

ASKED = ("demo", "--hardware=h200", "--claim=runs")
RECORD = {"schema": 1, "stack": "cuda-mcore0.16", "revision": "", "inputs": "", "python": "3.12.3"}


def launch(*words: str, form: str = "jobset") -> subprocess.CompletedProcess[str]:
    return run_bundle("launch", "kubernetes", *ASKED, f"--form={form}", *words)


@pytest.fixture
def record(tmp_path) -> str:
    packages = {"megatron-core": "0.16.1", "torch": "2.11.0"}
    file = tmp_path / "image.json"
    file.write_text(json.dumps(RECORD | {"sources": {}, "packages": packages}))
    assert image.read_record(file).megatron_version == "0.16.1"
    return str(file)


def test_without_a_name_it_runs_in_the_image_of_ours_for_it(record):
    registry = "--registry=registry.example/team"
    done = launch(f"--image-record={record}", registry, "--set=train.global_batch_size=64")
    assert done.returncode == 0, done.stderr
    _, jobset = read(done.stdout)
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (of_cuda,) = (
        each for each in images.load_images() if (each.backend, each.megatron) == ("cuda", "0.16.1")
    )
    assert pod["containers"][0]["image"] == f"registry.example/team/{of_cuda.tag}"


def test_an_image_that_is_none_of_ours_has_a_name():
    done = launch("--image-record=none")
    assert done.returncode == 2
    assert "--image" in done.stderr and "REGISTRY/cuda:" in done.stderr


def test_an_empty_form_is_refused():
    done = launch(form="")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "--form" in done.stderr


def test_a_form_that_no_image_of_ours_can_run_wants_one(messages):
    done = launch("--image-record=none", form="rayjob")
    assert done.returncode == 2 and "--image" in done.stderr
    messages(drop_times(done.stderr))


def test_the_ray_that_kuberay_is_told_of_is_the_least_that_the_extra_takes():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    least = rayjob.RAY_VERSION.removesuffix(".0")
    assert project["project"]["optional-dependencies"]["ray"] == [f"ray[default]>={least}"]


@pytest.fixture
def recipe(tmp_path) -> str:
    """That of a user: the demo for any backend, with a batch for thousands of ranks."""
    text = (ROOT / "launch/recipes/demo.yaml").read_text()
    for key, old, new in (("global_batch_size", "16", "8192"), ("backend", "cpu", "auto")):
        assert f"{key}: {old}\n" in text
        text = text.replace(f"{key}: {old}\n", f"{key}: {new}\n")
    (tmp_path / "mine.yaml").write_text(text)
    return "mine.yaml"


@pytest.mark.parametrize("form", [form for form in FORMS_BY_NAME if form not in ("ascendjob", "rayjob")])
def test_a_recipe_and_a_number_of_nodes_are_enough_for_a_thousand_in_two_seconds(
    recipe, tmp_path, form, capsys, messages
):
    words = ("launch", "kubernetes", recipe, "--nodes", "1024", "--dry-run")
    said = () if form == next(iter(FORMS_BY_NAME)) else (f"--form={form}",)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_bundle(*words, *said, cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    with capsys.disabled():
        print(f"[{seconds:.2f} s of a processor]", end="")
    assert seconds < 2
    objects = read(done.stdout)
    ((count, pod),) = pods(objects)
    assert count == 1024
    claims = [volume.get("persistentVolumeClaim") for volume in pod["spec"]["volumes"]]
    assert {"claimName": DEFAULT_CLAIM} in claims
    of_cpu = next(each for each in images.load_images() if each.backend == "cpu")
    if form != "trainjob":  # which has it in its runtime
        assert pod["spec"]["containers"][0]["image"] == f"{images.LOCAL_BUILD_IMAGE_PREFIX}/{of_cpu.tag}"
    job = parse(objects[0]["data"]["job.json"])
    assert (job.nodes, job.patches, job.image) == (1024, None, UNDECIDED)
    unsaid, machine = done.stderr.splitlines()
    assert "megatron-core 0.16.1" in unsaid and "--image-record" in unsaid
    assert "cpu" in machine and "--hardware" in machine
    messages(drop_times(done.stderr))


@pytest.mark.parametrize("said", ["--hardware=cpu", "--backend=cpu"])
def test_who_asks_for_cpu_is_not_told_of_it(recipe, tmp_path, said):
    words = ("launch", "kubernetes", recipe, "--image=x", "--image-record=none", said, "--dry-run")
    done = run_bundle(*words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_installed_here_says_nothing_of_an_image(tmp_path, monkeypatch):
    here = tmp_path / "megatron/core"
    here.mkdir(parents=True)
    (here / "__init__.py").touch()
    (here / "package_info.py").write_text("MAJOR, MINOR, PATCH, PRE_RELEASE = 0, 15, 0, ''\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    done = launch("--image=elsewhere", "--set=train.global_batch_size=64")
    job = parse(read(done.stdout)[0]["data"]["job.json"])
    assert (job.megatron, job.patches, job.image) == ("0.16.1", None, UNDECIDED)
    assert "--hardware" not in done.stderr
    done = launch("--mcore=0.19.2", "--set=train.global_batch_size=64")
    assert "megatron-core 0.19.2" in done.stderr
    objects = read(done.stdout)
    assert parse(objects[0]["data"]["job.json"]).megatron == "0.19.2"
    ((_, pod),) = pods(objects)
    assert "mcore0.19.2" in pod["spec"]["containers"][0]["image"]


def test_a_machine_that_is_not_here_is_asked_for_and_nothing_else_is_said(tmp_path):
    done = run_bundle("launch", "kubernetes", "sft-qwen3-8b-h200", "--dry-run")
    assert done.returncode == 3 and done.stdout == ""
    assert "--hardware a100" in done.stderr and "--image-record" not in done.stderr


def read_absent(*overrides: str) -> list[str]:
    done = launch("--image-record=none", "--image=x", *(f"--set={each}" for each in overrides))
    assert done.returncode == 0 and read(done.stdout), done.stderr
    return [line for line in done.stderr.splitlines() if "checked on this machine" in line]


def test_inputs_that_are_not_here_are_warned_of_and_the_objects_are_printed(tmp_path):
    (tmp_path / "model.safetensors").write_text("no header")
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    batch = "train.global_batch_size=64"
    absent = {"data.path": "/data/rows.txt", "data.tokenizer": "/data/tokenizer", "model.path": str(tmp_path)}
    warnings = read_absent(
        batch,
        f"data.path=[{absent['data.path']}]",
        f"data.tokenizer=hf:{absent['data.tokenizer']}",
        f"model={{path: {tmp_path}}}",
        "parallel.ep=1",
    )
    for key, value in absent.items():
        assert any(key in line and value in line for line in warnings), warnings
    assert all(any(key in line for key in absent) for line in warnings), warnings
    assert read_absent(batch) == []


@pytest.mark.parametrize(
    ("endpoint", "count"),
    [("{port: 1}", 1), ("{port: 1, address: '::1'}", 1), ("{port: 1, address: 0.0.0.0}", 0)],
)
def test_an_endpoint_that_only_its_pod_reaches_is_a_warning(endpoint, count, messages):
    done = launch("--set=train.global_batch_size=64", f"--set=metrics.prometheus={endpoint}")
    warnings = [line for line in done.stderr.splitlines() if "metrics.prometheus.address" in line]
    assert (done.returncode, len(warnings)) == (0, count), done.stderr
    for warning in warnings:
        messages(drop_times(warning))
