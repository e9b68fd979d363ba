"""What is missing is found before any rank starts, by `plan`, `train --dry-run` and `train` alike."""

import importlib.util
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

import bundle
from bundle.planning import inputs
from bundle.recipe import load
from tests.command import run_bundle, run_without_torch, sets
from tests.runs.test_origin import kept_by

pytestmark = pytest.mark.processes

ROOT = Path(bundle.__file__).parents[1]
VERBS = [("plan",), ("train", "--dry-run"), ("train",)]


def run(*words, cwd, code=0, **environment):
    done = run_bundle(*words, cwd=cwd, code=code, timeout=120, environment=environment)
    return done.stdout + done.stderr


def select_problems(said):
    """What is against the job, without the plan above it."""
    return said.rpartition("\nproblems ")[2].strip()


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_everything_that_is_missing_is_said_at_once_and_nothing_is_made(verb, tmp_path, messages):
    (tmp_path / "runs").write_text("a file where runs would live")
    (tmp_path / "empty").mkdir()
    missing = sets("data.path=[nowhere, no/*.txt, empty]", "data.tokenizer=hf:empty")
    said = run(verb[0], "demo", *verb[1:], *missing, cwd=tmp_path, code=2)
    for part in (
        *("data.path 'nowhere':", "data.path 'no/*.txt':", "data.path 'empty':"),
        *("data.tokenizer: 'empty' ", "run directory 'runs/demo':"),
    ):
        assert part in said
    assert "Traceback" not in said and sorted(os.listdir(tmp_path)) == ["empty", "runs"]  # noqa: PTH208
    messages(select_problems(said))
    said = run(verb[0], "demo", *verb[1:], *sets("data.tokenizer=hf:gone"), cwd=tmp_path, code=2)
    assert "data.tokenizer: 'gone'" in said


@pytest.mark.parametrize("flags", [["--dry-run"], []], ids=" ".join)
def test_a_checkpoint_that_is_not_there(flags, tmp_path, messages):
    said = run("train", "demo", "--from", "gone", *flags, cwd=tmp_path, code=2)
    assert "--from gone: " in said
    messages(said)


@pytest.mark.parametrize("verb", ["plan", "check"])
@pytest.mark.slow
def test_what_a_run_would_take_of_a_checkpoint_is_said(tmp_path, verb, messages):
    kept_by(tmp_path / "before", load("demo"), 7)
    few = sets(
        "data.path=[text.txt]", "data.validation=0", "train.global_batch_size=2", "train.micro_batch_size=1"
    )
    (tmp_path / "text.txt").write_text("a" * 2000)
    whole, alone = ["--from", "before", *few], ["--from", "before", "--weights-only", *few]
    for flags in (whole, alone):
        said = run(verb, "demo", *flags, cwd=tmp_path)
        (line,) = [line for line in said.splitlines() if "before/checkpoints/step-00000007" in line]
        messages(line)
    said = run(verb, "demo", "--from", "gone", *few, cwd=tmp_path, code=2)
    assert "--from gone: " in said
    other = sets("model.config.num_hidden_layers=3")
    said = run(verb, "demo", *alone, *other, cwd=tmp_path, code=2)
    assert "step-00000007" in said and re.search(r"\bnum_layers: 4 .* 3 ", said)
    messages(select_problems(said))
    said = run(verb, "demo", "--weights-only", *few, cwd=tmp_path, code=2)
    assert "--weights-only" in said and "--from" in said
    messages(said)


def problems(directory, *overrides):
    return [
        (int(p.code), p.text)
        for p in inputs.find_input_output_problems(load("demo", overrides), Path(directory))
    ]


def test_a_run_directory_that_nobody_may_write_to(tmp_path, monkeypatch, messages):
    assert problems(tmp_path / "a" / "b") == []
    asked: list[tuple[Path, int]] = []

    def refused(path, mode):
        asked.append((path, mode))
        return False

    monkeypatch.setattr(os, "access", refused)
    ((code, text),) = problems(tmp_path / "a" / "b")
    assert code == 3 and f"{tmp_path}," in text and "--run-directory" in text
    assert asked == [(tmp_path, os.W_OK | os.X_OK)]
    messages(text)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_a_run_directory_that_is_no_name(name):
    ((code, text),) = problems(name)
    assert code == 2 and text.startswith("run directory ")


def test_a_dangling_link_is_no_run_directory(tmp_path, messages):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    ((code, text),) = problems(tmp_path / "link" / "run")
    assert code == 2 and f"'{tmp_path / 'link'}' " in text
    messages(text)


def test_packages_that_the_data_needs(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "a.parquet").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    overrides = f"data.tokenizer=hf:{tmp_path}", "data.source=parquet", f"data.path={tmp_path}/a.parquet"
    assert [code for code, text in problems(tmp_path, *overrides) if "[data]" in text] == [3, 3]


def test_a_python_without_torch_is_3_with_doctors_fix(tmp_path, messages):
    done = run_without_torch("train", "demo", cwd=tmp_path, code=3)
    assert "torch: " in done.stderr and "mcore-bundle[cpu]" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "runs").exists()
    messages(done.stderr)


PLANNED = [
    ("demo",),
    ("demo", "--backend", "cpu", "--devices-per-node", "4", *sets("train.global_batch_size=32")),
    (
        "qwen3-tp2-sp",
        "--devices-per-node",
        "8",
        *sets("backend=auto", "train.global_batch_size=16"),
        "--backend",
        "cpu",
    ),
    ("demo", *sets("devices.nodes=2", "train.micro_batch_size=4"), "--nodes", "1"),
    ("demo", *sets("devices.nodes=2", "train.micro_batch_size=4")),
    ("demo", "--nodes", "2", *sets("train.global_batch_size=64", "devices.per_node=2")),
]


@pytest.mark.parametrize("words", PLANNED, ids=" ".join)
def test_the_command_of_a_plan_starts_what_was_planned(words, tmp_path):
    said = json.loads(run("plan", *words, "--json", cwd=tmp_path))
    command = said["run"].replace("RANK", "0").replace("HOST:PORT", "HOST:29500")
    first = run(*shlex.split(command)[1:], "--dry-run", cwd=tmp_path).splitlines()[1]
    planned, starts = shlex.split(said["starts"]), shlex.split(first)
    assert starts[starts.index(sys.executable) :] == planned[planned.index(sys.executable) :]
    assert f"--nproc-per-node={said['layout']['per_node']}" in starts
    assert f"--nnodes={said['layout']['nodes']}" in starts


@pytest.mark.parametrize(("hardware", "backend"), [("h200", "cuda"), ("a2", "ascend")])
def test_the_command_for_another_machine_says_its_backend(hardware, backend, tmp_path):
    words = "demo", *sets("train.global_batch_size=64"), "--mcore", "0.16.1"
    said = run("plan", *words, "--hardware", hardware, cwd=tmp_path)
    assert f"--backend {backend}" in said and f"for {hardware}: " in said
    assert ("emulated" in said) is (backend == "ascend")


def test_what_a_starter_says_of_the_ranks_of_a_node_holds(tmp_path, messages):
    words = "train", "demo", "--dry-run", *sets("train.global_batch_size=32")
    kubeflow = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"}
    assert "--nproc-per-node=4" in run(*words, cwd=tmp_path, **kubeflow)
    said = run(*words, *sets("devices.per_node=2"), cwd=tmp_path, code=2, **kubeflow)
    assert "devices.per_node: 2," in said and " 4 " in said
    messages(said)


def test_the_ascend_operator_s_list_of_devices_is_what_a_node_starts(tmp_path):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    node = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "0,1,2,3", **address}
    words = "train", "demo", "--dry-run", *sets("train.global_batch_size=32")
    assert "--nproc-per-node=4" in run(*words, cwd=tmp_path, **node)


def test_a_recipe_for_two_machines_is_not_started_on_one(tmp_path, messages):
    words = "train", "demo", *sets("devices.nodes=2", "train.micro_batch_size=4")
    said = run(*words, cwd=tmp_path, code=2)
    assert "devices.nodes=2" in said and "--node-rank" in said
    messages(said)
