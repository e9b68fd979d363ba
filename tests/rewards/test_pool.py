"""Rewards in processes: sums, failures by kind and never 0, time-outs paid once, nothing left behind."""

import math
import os
import random
import subprocess
import sys
import time
from collections import Counter
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bundle.errors import ExitCode, JobFailed, UsageError
from bundle.recipe.rl import RLReward
from bundle.rewards import Failure, FailureKind, RewardPool, check_failed_share, combine_verdicts
from bundle.rewards.pool import name_rewards
from tests.rewards import functions


def reward(name: str, **keys) -> RLReward:
    return RLReward(kind="python", function=f"{functions.HERE}:{name}", **keys)


def judge(name: str, answers, rows=None, **keys):
    with RewardPool([reward(name, **keys)]) as pool:
        return pool.judge_all(answers, rows or [{}] * len(answers))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        return file.read().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("processes", [1, 3])
def test_a_reward_is_the_weighted_sum(processes):
    rewards = [
        reward("polite", weight=0.1, processes=processes),
        reward("return_column", weight=-2.0, processes=processes),
        RLReward(kind="exact", field="label"),
    ]
    draw = random.Random(3)
    answers = [draw.choice(["please", "no", " 7 "]) for _ in range(20)]
    rows = [{"value": draw.random(), "label": 7} for _ in answers]
    expected = [
        0.1 * ("please" in a) - 2 * row["value"] + (a == " 7 ") for a, row in zip(answers, rows, strict=True)
    ]
    with RewardPool(rewards) as pool:
        for count in (20, 0, 1, 2, 7):
            judgement = pool.judge_all(answers[:count], rows[:count])
            np.testing.assert_allclose(judgement.rewards, expected[:count], rtol=1e-12, atol=1e-12)
            assert (judgement.failed, judgement.unjudged, judgement.failures) == (0, 0, {})
    assert pool.names == ["polite", "return_column", "exact"]


def test_a_function_gets_every_column_of_the_row():
    values = [{"a": [1, {"b": None}]}, "text", 2.5, b"\xff", None, True]
    rows = [{"value": len(repr(value)), "more": value} for value in values]
    assert judge("return_column", ["x"] * 6, rows).rewards == [len(repr(value)) for value in values]


def test_an_answer_that_no_reward_can_judge_is_left_out_and_is_no_failure():
    judgement = judge("abstain", ["a", "?", "b"])
    assert np.array_equal(judgement.rewards, [1, math.nan, 1], equal_nan=True)
    assert (judgement.failed, judgement.unjudged, judgement.first_reason) == (0, 1, None)


@pytest.mark.parametrize(("name", "expected"), [("generate", [1, 2]), ("print_much", [1, 1])])
def test_iterables_booleans_and_output_are_taken(name, expected):
    assert judge(name, ["a", "bb"]).rewards == expected


FAILURES = [
    ("raise_error", "raised", "no a"),
    ("raise_unpleasant", "raised", "Unpleasant"),
    ("leave", "raised", "SystemExit: 3"),
    ("return_text", "text", "'1'"),
    ("return_one_text", "wrong_count", "str"),
    ("return_few", "wrong_count", "2 rewards for 3"),
    ("return_many", "wrong_count", "more"),
    ("generate_forever", "wrong_count", "more"),
    ("return_number", "wrong_count", "float"),
    ("return_nan", "not_a_number", "nan"),
    ("return_infinity", "not_a_number", "-inf"),
    ("return_lists", "not_a_number", "list"),
]


def test_each_failure_is_counted_by_kind_and_is_never_0(messages):
    """All in one pool: what one reward does is no other's failure."""
    rewards = [reward(name) for name, _, _ in FAILURES] + [reward("polite")]
    answers = ["a", "please", "c"]
    with RewardPool(rewards) as pool:
        judgement = pool.judge_all(answers, [{}] * 3)
    assert judgement.failures == {(name, kind): 3 for name, kind, _ in FAILURES}
    assert all(map(math.isnan, judgement.rewards)) and judgement.failed == 3
    assert judgement.values["polite"] == [0.0, 1.0, 0.0]
    assert all(math.isnan(value) for name, _, _ in FAILURES for value in judgement.values[name])
    for name, _, value in FAILURES:
        only = judge(name, answers)
        assert only.first_reason is not None and value in only.first_reason
        assert name in only.first_reason
        messages(only.first_reason)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_reward_that_hangs_costs_its_time_out_once_and_is_usable_again(processes):
    keys = {"timeout_seconds": 1.0, "processes": processes}
    with RewardPool([reward("hang", **keys), reward("polite")]) as pool:
        for _ in range(2):
            begin = time.monotonic()
            judgement = pool.judge_all(["hang"] * 64, [{}] * 64)
            # Once, not for each of 64 answers; the rest is what starting a process takes on a busy machine.
            assert 1.0 <= time.monotonic() - begin < 20
            assert judgement.failures == {("hang", "timed_out"): 64} and judgement.failed == 64
            assert all(map(math.isnan, judgement.rewards)) and judgement.values["polite"] == [0.0] * 64
            assert pool.judge_all(["a", "please"], [{}] * 2).rewards == [0.5, 1.5]


def test_what_a_hanging_reward_has_started_ends_with_it(tmp_path):
    pid = tmp_path / "pid"
    with RewardPool([reward("hang_behind_another", timeout_seconds=2.0)]) as pool:
        assert pool.judge_all(["hang"], [{"pid": str(pid)}]).failed == 1
        deadline = time.monotonic() + 10
        while is_alive(int(pid.read_text())) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_alive(int(pid.read_text()))


def test_a_process_that_dies_is_counted_and_replaced():
    with RewardPool([reward("die")]) as pool:
        judgement = pool.judge_all(["a", "die"], [{}] * 2)
        assert judgement.failures == {("die", "died"): 2} and "7" in str(judgement.first_reason)
        assert pool.judge_all(["a"], [{}]).rewards == [0.5]


def test_processes_end_with_the_pool_and_after_an_error_at_the_start(tmp_path):
    pool = RewardPool([reward("polite", processes=2)])
    pids = [process._process.pid for judge in pool._worker_judges for process in judge.processes]
    assert len(pids) == 2 and all(map(is_alive, pids))
    pool.close()
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("def good(a, r): return []", "gone", "gone"),
        ("x = 1/0", "x", "ZeroDivisionError"),
        ("def f(:", "f", "SyntaxError"),
        ("x = 3", "x", "no function"),
        ("import os; os._exit(9)", "x", "9"),
        (None, "x", "no such file"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_refused_at_the_start(tmp_path, text, name, value, messages):
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    bad = RLReward(kind="python", function=f"{path}:{name}")
    with pytest.raises(UsageError) as caught:
        RewardPool([reward("polite"), bad, bad])
    assert caught.value.code is ExitCode.USAGE and len(caught.value.violations) == 2
    for number, line in enumerate(caught.value.violations, 1):
        assert line.startswith(f"rl.rewards.{number}.function: {path}:{name}") and value in line
    messages(caught.value.violations[0])


def test_a_reward_may_import_its_neighbours(tmp_path):
    (tmp_path / "helper.py").write_text("BONUS = 4")
    (tmp_path / "mine.py").write_text(
        "import dataclasses, helper\n@dataclasses.dataclass\nclass C:\n  a: int\n"
        "def f(answers, rows): return [helper.BONUS] * len(answers)"
    )
    with RewardPool([RLReward(kind="python", function=f"{tmp_path}/mine.py:f")]) as pool:
        assert pool.judge_all(["a"], [{}]).rewards == [4]


def test_a_large_step_passes_through():
    answers, rows = ["x" * 10_000] * 300, [{"value": 1.0, "text": "y" * 10_000}] * 300
    assert judge("return_column", answers, rows).rewards == [1.0] * 300


@given(
    st.lists(
        st.lists(
            st.none() | st.floats(-5, 5) | st.sampled_from(["raised", "text", "timed_out"]),
            min_size=3,
            max_size=3,
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=200, deadline=None)
def test_sums_and_counts_are_those_of_numpy(table):
    names, weights = ("a", "b", "c"), (1.0, -0.5, 0.25)
    verdicts = [
        [Failure(cast(FailureKind, value), "why") if isinstance(value, str) else value for value in column]
        for column in zip(*table, strict=True)
    ]
    judgement = combine_verdicts(
        dict(zip(names, verdicts, strict=True)), dict(zip(names, weights, strict=True))
    )
    numbers = np.array([[v if isinstance(v, float) else np.nan for v in row] for row in table])
    np.testing.assert_allclose(judgement.rewards, numbers @ np.array(weights), rtol=1e-12, atol=1e-12)
    expected = Counter(
        (name, v) for row in table for name, v in zip(names, row, strict=True) if isinstance(v, str)
    )
    assert judgement.failures == expected
    is_failed = [any(isinstance(v, str) for v in row) for row in table]
    assert judgement.failed == sum(is_failed)
    assert judgement.failed + judgement.unjudged == np.isnan(judgement.rewards).sum()


@pytest.mark.parametrize("failed", [11, 100])
def test_more_failures_than_allowed_end_the_run_with_the_first_reason(failed, messages):
    for allowed in (0, 10):
        check_failed_share(allowed, 100, 0.1, "why")
    check_failed_share(0, 0, 0.0, None)
    with pytest.raises(JobFailed) as caught:
        check_failed_share(failed, 100, 0.1, "the reward polite failed: it raised ValueError: no")
    assert caught.value.code == 1
    text = str(caught.value)
    assert text.startswith("rl.max_failed: ") and str(failed) in text and "ValueError: no" in text
    messages(text)


def test_rewards_of_one_name_are_numbered():
    rewards = [reward("polite"), RLReward(kind="exact"), reward("polite"), RLReward(kind="math")]
    assert name_rewards(rewards) == ["polite_1", "exact", "polite_2", "math"]


def test_rows_of_another_number_are_refused():
    with RewardPool([RLReward(kind="exact")]) as pool, pytest.raises(ValueError, match="rows"):
        pool.judge_all(["a"], [])


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends them")
def test_a_hanging_reward_ends_with_the_rank_that_asked_it(tmp_path):
    script = (
        "import sys\nfrom bundle.rewards import RewardPool\nfrom bundle.recipe.rl import RLReward\n"
        f"pool = RewardPool([RLReward(kind='python', function='{functions.HERE}:hang')])\n"
        "print(pool._worker_judges[0].processes[0]._process.pid, flush=True)\n"
        "pool.judge_all(['hang'], [{}])"
    )
    rank = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    pid = int(rank.stdout.readline())
    time.sleep(0.3)
    assert is_alive(pid)
    rank.kill()
    rank.communicate()
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid)
