"""The reward math: values in many spellings, right and wrong, and answers that take for ever."""

import json
import math
import os
import random
import time
from fractions import Fraction
from pathlib import Path

import pytest

from bundle.errors import EnvironmentUnfit
from bundle.recipe.rl import RLReward
from bundle.rewards import RewardPool
from bundle.rewards.process import MAX_OVERRUNS_PER_CALL

GSM8K = Path(os.environ.get("BUNDLE_GSM8K", Path(__file__).parents[3] / "shared/data/gsm8k"))
# Powers of powers: Python computes them in C, where no signal is heard.
ENDLESS = "$9^{9^{9^{9}}}$"


@pytest.fixture(scope="module")
def pool():
    pytest.importorskip("math_verify")
    with RewardPool([RLReward(kind="math", field="answer", pattern="#### (.+)")]) as opened:
        yield opened


def judge(pool, answers, reference):
    return pool.judge_all(answers, [{"answer": f"Because.\n#### {reference}"}] * len(answers))


RIGHT = [
    ("1072", ["1072", "1,072", "The answer is 1,072.", "\\boxed{1072}", "1072.0", "first 3, then 1072"]),
    ("\\frac{1}{2}", ["1/2", "$\\frac{1}{2}$", "0.5", "\\boxed{\\dfrac12}"]),
    ("$x^2 + 2x + 1$", ["$(x+1)^2$", "\\boxed{1 + 2x + x^2}"]),
]
WRONG = [
    ("1072", ["1073", "", "no idea", "1.072", "-1072", "\\boxed{", "10 72x", "#### ####"]),
    ("\\frac{1}{2}", ["2", "$\\frac{1}{3}$"]),
]


def test_every_spelling_of_the_right_value_is_1(pool):
    for reference, answers in RIGHT:
        judgement = judge(pool, answers, reference)
        assert dict(zip(answers, judgement.rewards, strict=True)) == dict.fromkeys(answers, 1.0)


def test_another_value_and_no_value_are_0_and_no_failure(pool):
    for reference, answers in WRONG:
        judgement = judge(pool, answers, reference)
        assert dict(zip(answers, judgement.rewards, strict=True)) == dict.fromkeys(answers, 0.0)
        assert not judgement.failures


def test_the_right_answer_is_the_first_of_two_that_math_verify_compares(pool):
    """It takes an interval for a relation, but no relation for an interval."""
    assert judge(pool, ["$(1,2)$"], "$1<x<2$").rewards == [1.0]
    assert judge(pool, ["$1<x<2$"], "$(1,2)$").rewards == [0.0]


def test_numbers_are_compared_as_exact_fractions_are(pool):
    draw = random.Random(5)
    pairs = [
        (
            Fraction(draw.randint(-20, 20), draw.randint(1, 6)),
            Fraction(draw.randint(-20, 20), draw.randint(1, 6)),
        )
        for _ in range(40)
    ]
    pairs += [(one, one) for one, _ in pairs[:20]]
    rows = [{"answer": f"#### {right}"} for _, right in pairs]
    judgement = pool.judge_all([f"So it is ${given}$" for given, _ in pairs], rows)
    assert judgement.rewards == [float(given == right) for given, right in pairs]


@pytest.mark.skipif(not GSM8K.is_dir(), reason=f"GSM8K is not in {GSM8K}: set BUNDLE_GSM8K to its directory")
def test_the_published_answers_of_gsm8k_are_right_and_those_of_other_rows_wrong(pool):
    rows = [json.loads(line) for line in (GSM8K / "test.jsonl").read_text().splitlines()[:150]]
    finals = [row["answer"].rpartition("#### ")[2].strip() for row in rows]
    assert pool.judge_all([f"The answer is {final}." for final in finals], rows).rewards == [1.0] * len(rows)
    others = [*finals[1:], finals[0]]
    expected = [float(a.replace(",", "") == b.replace(",", "")) for a, b in zip(others, finals, strict=True)]
    assert pool.judge_all(others, rows).rewards == expected


def test_a_row_without_a_value_is_a_failure_and_not_0(pool):
    judgement = pool.judge_all(["1", "2", "2"], [{"answer": "1"}, {"answer": "#### 2"}, {"question": "x"}])
    assert judgement.failures == {("math", "raised"): 2}
    assert judgement.rewards[1] == 1.0 and math.isnan(judgement.rewards[0] + judgement.rewards[2])


def test_an_answer_that_takes_for_ever_costs_its_own_time_alone():
    pytest.importorskip("math_verify")
    with RewardPool([RLReward(kind="math", field="answer", timeout_seconds=1.5)]) as pool:
        answers = ["7", "8", ENDLESS, "7", "8"]
        judgement = pool.judge_all(answers, [{"answer": "7"}] * 5)
        assert math.isnan(judgement.rewards[2]) and judgement.failed == 1
        assert [*judgement.failures] in ([("math", "timed_out")], [("math", "raised")], [("math", "died")])
        assert judgement.rewards[:2] + judgement.rewards[3:] == [1.0, 0.0, 1.0, 0.0]
        assert pool.judge_all(["7"], [{"answer": "7"}]).rewards == [1.0]


def test_many_answers_that_take_for_ever_are_given_up_after_some(monkeypatch):
    pytest.importorskip("math_verify")
    monkeypatch.setattr("bundle.rewards.process.MAX_OVERRUNS_PER_CALL", 2)
    assert MAX_OVERRUNS_PER_CALL == 10
    with RewardPool([RLReward(kind="math", field="answer", timeout_seconds=0.7)]) as pool:
        begin = time.monotonic()
        judgement = pool.judge_all([ENDLESS] * 40, [{"answer": "7"}] * 40)
        assert judgement.failed == 40 and time.monotonic() - begin < 25
        assert pool.judge_all(["7"], [{"answer": "7"}]).rewards == [1.0]


def test_without_the_package_the_pool_says_what_to_install(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ModuleNotFoundError('no', name='math_verify')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EnvironmentUnfit) as caught:
        RewardPool([RLReward(kind="exact"), RLReward(kind="math")])
    assert caught.value.code == 3
    assert str(caught.value).startswith("rl.rewards.1.kind: ") and "mcore-bundle[rl]" in str(caught.value)
