"""What rollouts by servers need of this machine is said before a rank starts; their memory is in the plan."""

import importlib.metadata
import sys

import pytest

from bundle import files
from bundle.errors import ExitCode
from bundle.planning.rollout import RolloutBytes, count_weights_folder_bytes, estimate_rollout
from bundle.planning.servers import find_rollout_machine_problems
from bundle.recipe import load

URLS, REPLAY = "rl.rollout.urls=['http://one:1']", "rl.rollout.path=answers"


def build(*overrides: str):
    return load("grpo-arithmetic-cpu", ["rl.rollout.engine=sglang", *overrides])


def collect(*overrides: str) -> set[str]:
    problems = list(find_rollout_machine_problems(build(*overrides)))
    assert {problem.code for problem in problems} <= {ExitCode.ENVIRONMENT_UNFIT}
    return {problem.text.partition(":")[0] for problem in problems}


def test_servers_of_another_python_and_servers_that_run_need_no_sglang_of_ours():
    assert collect(f"rl.rollout.python={sys.executable}") == set()
    assert collect(URLS) == set()
    assert list(find_rollout_machine_problems(load("grpo-arithmetic-cpu"))) == []
    assert collect(REPLAY) == set()


@pytest.mark.parametrize(
    ("version", "keys"), [("0.5.15", {"rl.rollout.engine"}), ("0.5.16", set()), (None, None)]
)
def test_an_old_sglang_or_none_is_a_problem(tmp_path, monkeypatch, version, keys):
    monkeypatch.syspath_prepend(tmp_path)
    if version is not None:
        (tmp_path / f"sglang-{version}.dist-info").mkdir()
        (tmp_path / f"sglang-{version}.dist-info" / "METADATA").write_text(
            f"Name: sglang\nVersion: {version}\n"
        )
        assert importlib.metadata.version("sglang") == version
    assert collect() == ({"rl.rollout.engine"} if keys is None else keys)


def test_a_python_that_is_none_is_a_problem(tmp_path, messages):
    problems = list(find_rollout_machine_problems(build(f"rl.rollout.python={tmp_path}/python")))
    assert [problem.text.partition(":")[0] for problem in problems] == ["rl.rollout.python"]
    messages(problems[0].text)


def test_a_folder_without_room_for_two_versions_is_a_problem(tmp_path, monkeypatch):
    recipe = [f"rl.rollout.python={sys.executable}", f"rl.rollout.weights_folder={tmp_path}"]
    needed = count_weights_folder_bytes(build())
    assert needed == 2 * estimate_rollout(build(), 1).weights  # MTP layers of Qwen3 are not published
    for free, keys in ((needed, set()), (needed - 1, {"rl.rollout.weights_folder"})):
        monkeypatch.setattr(files, "find_free_bytes", lambda path, free=free: free)
        assert collect(*recipe) == keys


def test_a_server_of_the_run_stands_beside_the_trainer_and_another_does_not():
    own = estimate_rollout(build(), 1)
    assert own.weights == estimate_rollout(load("grpo-arithmetic-cpu"), 1).weights and own.transient == 0
    assert estimate_rollout(build("rl.rollout.tp=2"), 1).weights == own.weights // 2
    assert estimate_rollout(build(URLS), 1) == RolloutBytes()
