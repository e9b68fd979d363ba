"""`mcore-bundle plan` as a user meets it."""

import json
import resource
from functools import partial

import pytest

from tests.command import run_bundle


def plan(*args, cwd, code=0):
    done = run_bundle("plan", *args, cwd=cwd, code=code, timeout=60)
    return done.stdout + done.stderr


def test_the_demo(tmp_path):
    said = plan("demo", "--mcore", "0.16.1", cwd=tmp_path)
    for part in (
        "2 ranks on 1 node",
        "APPLY mtp-zero-layers",
        "mcore-bundle train demo",
        "CUDA_VISIBLE_DEVICES",
    ):
        assert part in said
    assert list(tmp_path.iterdir()) == [], "a plan touches nothing"


def test_json_for_another_machine_and_release(tmp_path):
    args = ["--hardware", "h200", "--nodes", "2", "--mcore", "0.19.2", "--set", "train.global_batch_size=128"]
    said = json.loads(plan("demo", *args, "--json", cwd=tmp_path))
    assert (said["layout"]["world"], said["hardware"]["backend"]) == (16, "cuda")
    assert said["megatron"]["version"] == "0.19.2"
    assert "--nodes 2 --node-rank RANK --rendezvous HOST:PORT" in said["run"]
    assert "--nnodes=2" in said["starts"]


def test_a_trap_ends_with_2_and_says_what_to_change(tmp_path, messages):
    trap = "moe-tensor-without-expert-parallel"
    sets = ["--set", "parallel.tp=2", "--set", "parallel.ep=1", "--set", "parallel.etp=1"]
    said = plan("demo", *sets, "--mcore", "0.16.1", cwd=tmp_path, code=2)
    (line,) = [line for line in said.splitlines() if f" {trap}: " in line and "exit 2" in line]
    assert "parallel.etp" in line and "parallel.tp" in line
    messages(line)


@pytest.mark.parametrize(("nodes", "code"), [(504, 0), (506, 3)])
def test_the_open_files_of_node_0_are_compared_with_all_ranks_and_nodes(tmp_path, nodes, code):
    args = [f"--nodes={nodes}", "--devices-per-node=1", f"--set=train.global_batch_size={8 * nodes}"]
    few = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (300, 1024))
    done = run_bundle(
        "plan", "demo", "--backend=cpu", *args, "--json", cwd=tmp_path, code=code, preexec_fn=few
    )
    problems = [problem["text"] for problem in json.loads(done.stdout)["problems"]]
    assert [f"needs {2 * nodes + 14} for {nodes} nodes" in problem for problem in problems] == [True] * (
        code > 0
    )


def test_an_unfit_machine_ends_with_3(tmp_path, messages):
    args = ["--hardware", "h200", "--devices-per-node", "12", "--set", "train.global_batch_size=24"]
    said = plan("qwen3-tp2-sp", *args, cwd=tmp_path, code=3)
    (line,) = [line for line in said.splitlines() if "devices.per_node: 12" in line]
    messages(line)


def test_a_recipe_that_cannot_be_read_ends_with_2(tmp_path, messages):
    said = plan("nonsense", cwd=tmp_path, code=2)
    assert "'nonsense'" in said
    messages(said.splitlines()[0])


@pytest.mark.parametrize("version", ["0.99", "0.61.1"])
def test_a_megatron_that_there_is_not_ends_with_2(version, tmp_path, messages):
    said = plan("demo", "--mcore", version, cwd=tmp_path, code=2)
    assert f"--mcore {version}" in said and "0.12" in said
    messages(said)


def test_a_megatron_whose_number_alone_is_known_is_planned_for(tmp_path):
    assert "megatron-core 0.16.7" in plan("demo", "--mcore", "0.16.7", cwd=tmp_path)


def test_an_unknown_machine_ends_with_2(tmp_path, messages):
    said = plan("demo", "--hardware", "tpu", cwd=tmp_path, code=2)
    assert "--hardware" in said and "a100" in said
    messages(said.splitlines()[-1])
