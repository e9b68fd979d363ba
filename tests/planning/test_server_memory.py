"""A server on the trainer's device takes what the trainer leaves, and what does not fit is refused."""

import json
import sys

import pytest

from bundle.capabilities import EnvVariable
from bundle.errors import ExitCode
from bundle.planning.activations import ActivationBytes
from bundle.planning.memory import MemoryEstimate, StateBytes
from bundle.planning.rollout import RolloutBytes, choose_weight_transport, count_device_kv_cache_bytes
from bundle.planning.server_memory import (
    DeviceShare,
    add_kv_cache,
    compute_device_share,
    find_ipc_transport_problems,
)
from bundle.recipe import Recipe, load
from tests.command import run_bundle

GIB = 2**30
KEY, URLS = "rl.rollout.mem_fraction_static", "rl.rollout.urls=['http://one:1']"
SERVED = ["rl.rollout.engine=sglang"]


def build(*overrides: str) -> Recipe:
    return load("grpo-arithmetic-cpu", [*SERVED, *overrides])


def estimate(states: float, activations: float, weights: float, stage: int = 0) -> MemoryEstimate:
    rollout = RolloutBytes(int(weights * GIB), 0, 3 * GIB)
    passing = ActivationBytes(0, 0, int(activations * GIB), (1,))
    return MemoryEstimate(stage, StateBytes(parameters=int(states * GIB)), passing, rollout)


def share(*overrides: str, states: float = 40, weights: float = 8, device: float = 140) -> DeviceShare:
    stages = [estimate(states / 2, 30, weights), estimate(states, 20, weights, stage=1)]
    shared = compute_device_share(build(*overrides), stages, int(device * GIB))
    assert shared is not None
    return shared


def list_keys(shared: DeviceShare) -> list[str]:
    problems = list(shared.find_problems())
    assert {problem.code for problem in problems} <= {ExitCode.ENVIRONMENT_UNFIT}
    return [problem.text.partition(":")[0] for problem in problems]


def test_the_server_gets_what_the_trainer_and_a_tenth_of_the_device_leave():
    shared = share()
    assert shared.chosen == pytest.approx(0.59)  # (0.9 * 140 - 40 - 3 + 0.875) / 140 = 0.599
    assert shared.most == pytest.approx(0.69)  # (140 - 40 - 3 + 0.875) / 140 = 0.699
    assert shared.least == pytest.approx(0.07)  # (8 + 0.875) / 140 = 0.063
    assert (shared.states, shared.learning) == (40 * GIB, 60 * GIB)
    assert list_keys(shared) == []


def test_the_tenth_is_given_up_where_the_weights_need_it():
    shared = share(states=110, weights=15)  # (126 - 112.125) / 140 = 0.099, and the weights are 0.107
    assert (shared.least, shared.chosen, shared.most) == pytest.approx((0.12, 0.12, 0.19))
    assert list_keys(shared) == []


def test_the_least_share_has_room_for_the_longest_sequence():
    longest = ["data.sequence_length=1048576", "model.config.max_position_embeddings=1048576"]
    cache = 2 * 2 * 2 * 16 * 4 * 1048576  # layers, keys and values, heads, dimensions, bytes, tokens
    assert count_device_kv_cache_bytes(build(*longest), 1048576) == cache
    least = 0.01 * (100 * (cache + int(0.875 * GIB)) // (64 * GIB) + 1)
    assert share(*longest, weights=0, device=64).least == pytest.approx(least)


@pytest.mark.parametrize(
    ("fraction", "refused"), [("0.69", False), ("0.7", True), ("0.07", False), ("0.06", True)]
)
def test_a_share_that_does_not_fit_is_refused_with_those_that_do(fraction, refused, messages):
    shared = share(f"rl.rollout.mem_fraction_static={fraction}")
    assert list_keys(shared) == [KEY] * refused
    if refused:
        messages(next(shared.find_problems()).text)


def test_a_server_that_fits_beside_no_trainer_is_refused(messages):
    shared = share(states=130)
    assert list_keys(shared) == [KEY]
    messages(next(shared.find_problems()).text)


def test_the_cache_stands_beside_the_trainer_while_answers_are_sampled():
    stages = add_kv_cache([estimate(40, 20, 8)], share())
    assert stages[0].rollout.transient == pytest.approx((0.59 * 140 - 8 - 0.875) * GIB, abs=2)
    assert stages[0].sampling_peak == pytest.approx((40 + 3 - 0.875 + 0.59 * 140) * GIB, abs=2)
    assert stages[0].learning_peak == (40 + 8 + 3 + 20) * GIB
    assert stages[0].peak_bytes == stages[0].sampling_peak
    assert add_kv_cache([estimate(40, 20, 8)], None) == (estimate(40, 20, 8),)


def test_servers_elsewhere_and_unknown_devices_share_nothing(tmp_path):
    stages = [estimate(40, 20, 8)]
    assert compute_device_share(build(), stages, None) is None
    assert compute_device_share(build(URLS), stages, GIB) is None
    assert compute_device_share(build(f"rl.rollout.path={tmp_path}"), stages, GIB) is None
    assert compute_device_share(load("grpo-arithmetic-cpu"), stages, GIB) is None


@pytest.mark.parametrize(
    "overrides, backend, setting, transport",
    [
        ([], "cuda", "", "ipc"),
        ([], "cuda", "max_split_size_mb:64", "ipc"),
        ([], "cuda", "expandable_segments:True", "files"),
        ([], "cpu", "", "files"),
        ([], "ascend", "", "files"),
        (["rl.rollout.replicas=2"], "cuda", "", "files"),
        (["rl.rollout.tp=2"], "cuda", "", "files"),
        ([URLS], "cuda", "", "files"),
        (["rl.rollout.transport=files"], "cuda", "", "files"),
        (["rl.rollout.tp=2", "rl.rollout.transport=ipc"], "cuda", "", "ipc"),
    ],
)
@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_one_server_on_one_gpu_opens_the_memory_of_the_trainer(
    overrides, backend, setting, transport, variable
):
    assert choose_weight_transport(build(*overrides), backend, {variable: setting}) == transport


@pytest.mark.parametrize(
    "backend, setting", [("cpu", ""), ("ascend", ""), ("cuda", "a:1,expandable_segments:True")]
)
def test_memory_that_no_server_can_open_is_refused(backend, setting, messages):
    environment = [EnvVariable("PYTORCH_ALLOC_CONF", setting, "")]
    problems = list(find_ipc_transport_problems(build("rl.rollout.transport=ipc"), backend, environment))
    assert [problem.code for problem in problems] == [ExitCode.ENVIRONMENT_UNFIT]
    messages(problems[0].text)
    for recipe in (build(), build("rl.rollout.transport=files"), load("demo")):
        assert not list(find_ipc_transport_problems(recipe, backend, environment))
    allowed = find_ipc_transport_problems(build("rl.rollout.transport=ipc"), "cuda", [])
    assert not list(allowed)


@pytest.mark.processes
def test_a_plan_and_its_job_have_the_share(tmp_path):
    import torch

    from bundle.launch import job as job_file
    from bundle.rollouts.sglang.memory import TrainerMemory

    words = ["plan", "grpo-arithmetic-cpu", "--hardware=h200", "--backend=cuda", "--devices-per-node=1"]
    words += [f"--set={override}" for override in (*SERVED, f"rl.rollout.weights_folder={tmp_path}")]
    words += [f"--set=rl.rollout.python={sys.executable}", "--job", str(tmp_path / "job.json")]
    run_bundle(*words, cwd=tmp_path, code=0)
    job = job_file.load(tmp_path / "job.json")
    assert job.mem_fraction_static is not None and 0.8 < job.mem_fraction_static < 0.9
    stage = job.plan["stages"][0]["bytes"]
    assert job.learning_bytes == stage["learning"] - stage["rollout_weights"] - stage["rollout_overhead"]
    assert stage["sampling"] > 100 * GIB > stage["learning"]
    assert job.recipe.rl and job.recipe.rl.rollout.mem_fraction_static is None
    memory = TrainerMemory.from_job(job, torch.device("cuda"))
    assert memory == (torch.device("cuda"), int(0.9 * job.learning_bytes), job.mem_fraction_static)
    assert TrainerMemory.from_job(job, torch.device("cpu")) is None
    words[-2:] = ["--set=rl.rollout.mem_fraction_static=0.99", "--json"]
    code = ExitCode.ENVIRONMENT_UNFIT
    document = json.loads(run_bundle(*words, cwd=tmp_path, code=code).stdout)
    assert any("mem_fraction_static" in problem["text"] for problem in document["problems"])
    words[-2:] = ["--set=rl.rollout.transport=ipc", "--json"]
    run_bundle(*words, cwd=tmp_path, code=0)
    words.append("--set=environment.PYTORCH_ALLOC_CONF=expandable_segments:True")
    document = json.loads(run_bundle(*words, cwd=tmp_path, code=code).stdout)
    assert [problem["text"].partition(":")[0] for problem in document["problems"]] == ["rl.rollout.transport"]
