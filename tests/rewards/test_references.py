"""The right answer of a row: fields, patterns, and what is none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle.recipe.rl import RLReward
from bundle.rewards import RewardPool, find_reference
from bundle.rewards.pool import describe_missing_reference, list_right_answer_fields
from bundle.rewards.references import MissingReference

GSM8K = "She sold 48/2 = <<48/2=24>>24.\n#### 24\nOr so.\n#### 1,072 "


@pytest.mark.parametrize(
    ("row", "fields", "pattern", "expected"),
    [
        ({"answer": GSM8K}, ["answer"], "#### (.+)", "1,072"),
        ({"answer": GSM8K}, ["answer"], "[0-9]+$", None),
        ({"answer": "a 1 b 22"}, ["answer"], "[0-9]+", "22"),
        ({"answer": " x "}, ["answer"], None, "x"),
        ({"answer": 72}, ["answer"], None, "72"),
        ({"answer": 0.5}, ["answer"], None, "0.5"),
        ({"answer": False}, ["answer"], None, "false"),
        ({"reward_model": {"ground_truth": "7"}}, ["reward_model.ground_truth", "response"], None, "7"),
        ({"response": "8"}, ["reward_model.ground_truth", "response"], None, "8"),
        ({"a.b": "9", "a": {"b": "1"}}, ["a.b"], None, "9"),
        ({"answer": None, "x": 1}, ["answer"], None, None),
        ({"answer": ["1"]}, ["answer"], None, None),
        ({"answer": " "}, ["answer"], None, None),
        ({"answer": "ab"}, ["answer"], "a(x)?", None),
        ({"a": "text"}, ["a.b"], None, None),
    ],
)
def test_the_right_answer_is_read_or_missed(row, fields, pattern, expected):
    if expected is not None:
        assert find_reference(row, fields, pattern) == expected
        return
    with pytest.raises(MissingReference) as caught:
        find_reference(row, fields, pattern)
    assert str(caught.value).startswith(f"field {fields[0]}: ")


def test_the_default_is_the_answer_of_verl_and_then_the_response():
    fields = ("reward_model.ground_truth", "answer")
    assert list_right_answer_fields(RLReward(kind="math"), "answer") == fields
    assert list_right_answer_fields(RLReward(kind="math", field="x"), "answer") == ("x",)


def test_a_row_without_a_right_answer_names_reward_and_key():
    rewards = [RLReward(kind="exact", field="a"), RLReward(kind="math", field="b", pattern="#### (.+)")]
    assert describe_missing_reference(rewards, {"a": "1", "b": "#### 1"}, "response") is None
    for row, key in (({"b": "#### 1"}, "rl.rewards.0.field"), ({"a": "1", "b": "1"}, "rl.rewards.1.pattern")):
        assert str(describe_missing_reference(rewards, row, "response")).startswith(f"{key}: ")


@given(st.text(max_size=8), st.text(max_size=8))
def test_exact_is_equality_of_the_stripped_texts(answer, reference):
    with RewardPool([RLReward(kind="exact", field="x")]) as pool:
        judgement = pool.judge_all([answer, f"\n{reference} "], [{"x": reference}] * 2)
    if not reference.strip():
        assert judgement.failures == {("exact", "raised"): 2}
    else:
        assert judgement.rewards == [answer.strip() == reference.strip(), 1.0]
