"""What the rewards of a recipe lack on this machine is said before a rank starts."""

import pytest

from bundle.errors import ExitCode
from bundle.planning.inputs import find_existing_local_inputs, find_input_output_problems
from bundle.planning.rewards import find_reward_problems
from tests.data.test_questions import ROWS, build, write


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from os import path as elsewhere\ndef polite(answers, rows): raise SystemExit\nraise SystemExit"
    )
    return path


@pytest.mark.parametrize("name", ["polite", "elsewhere"])
def test_a_function_that_a_file_has_is_no_problem_and_nothing_runs(mine, name):
    recipe = build("data.path=x.jsonl", reward=f"{{kind: python, function: '{mine}:{name}'}}")
    assert [*find_reward_problems(recipe)] == []


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        (None, "polite", "No such file"),
        ("def f(:", "polite", "not valid Python"),
        ("def other(a, b): ...", "polite", "other"),
    ],
)
def test_a_missing_file_or_function_is_named(tmp_path, text, name, value):
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    data = write(tmp_path / "rows.jsonl", ROWS)
    recipe = build(
        f"data.path={data}", reward=f"{{kind: exact}}, {{kind: python, function: '{path}:{name}'}}"
    )
    (problem,) = find_input_output_problems(recipe, tmp_path / "run")
    assert problem.code is ExitCode.USAGE
    assert problem.text.startswith(f"rl.rewards.1.function: {path}:{name}: ") and value in problem.text


def test_math_needs_its_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = find_reward_problems(build("data.path=x.jsonl", reward="{kind: math}"))
    assert problem.code is ExitCode.ENVIRONMENT_UNFIT and problem.text.startswith("rl.rewards.0.kind: ")


def test_code_needs_linux(monkeypatch):
    recipe = build("data.path=x.jsonl", reward="{kind: code, tests: tests}, {kind: http, url: 'http://host'}")
    monkeypatch.setattr("sys.platform", "linux")
    assert [*find_reward_problems(recipe)] == []
    monkeypatch.setattr("sys.platform", "darwin")
    (problem,) = find_reward_problems(recipe)
    assert problem.code is ExitCode.ENVIRONMENT_UNFIT and problem.text.startswith("rl.rewards.0.kind: ")


def test_rows_to_evaluate_with_must_be_here(tmp_path):
    data = write(tmp_path / "rows.jsonl", ROWS)
    gone = tmp_path / "gone.jsonl"
    recipe = build(f"data.path={data}", f"rl.evaluation={{path: [{gone}]}}")
    (problem,) = find_input_output_problems(recipe, tmp_path / "run")
    assert problem.text.startswith(f"rl.evaluation.path '{gone}'")
    write(gone, ROWS)
    assert [*find_input_output_problems(recipe, tmp_path / "run")] == []
    assert {one.key for one in find_existing_local_inputs(recipe)} == {"data.path", "rl.evaluation.path"}


def test_answers_of_files_must_be_here(tmp_path):
    data = write(tmp_path / "rows.jsonl", ROWS)
    recipe = build(f"data.path={data}", f"rl.rollout.path={tmp_path}")
    (problem,) = find_reward_problems(recipe)
    assert problem.code == ExitCode.USAGE and problem.text.startswith(f"rl.rollout.path: {tmp_path} ")
    (tmp_path / "step-00000000.jsonl").touch()
    assert [*find_reward_problems(recipe)] == []
    assert "rl.rollout.path" in {one.key for one in find_existing_local_inputs(recipe)}


def test_the_files_of_functions_are_inputs_of_the_job(tmp_path):
    data, reward = write(tmp_path / "rows.jsonl", ROWS), tmp_path / "mine.py"
    reward.write_text("def polite(answers, rows):\n    return [1.0] * len(answers)\n")
    recipe = build(f"data.path={data}", reward=f"{{kind: python, function: {reward}:polite}}")
    (found,) = [one for one in find_existing_local_inputs(recipe) if one.key == "rl.rewards.0.function"]
    assert found.paths == (reward,)
