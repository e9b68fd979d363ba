"""Answers against transformers' own full forward pass, without a cache, padding or batch, in float64."""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from bundle.errors import JobFailed, UsageError
from bundle.rollouts import Request, Sampling
from bundle.rollouts.sampling import choose_tokens, draw_uniforms, sample_with_transformers
from tests.rollouts.families import CONFIGS, draw_model

STOP = (3, 5)


def rounding(name: str) -> float:
    """transformers computes some parts of a float64 model in float32, gated delta nets in two ways."""
    return 1e-3 if name == "linear" else 3e-6


def requests_of(lengths, answers=2, seed=1) -> list[Request]:
    random = np.random.default_rng(seed)
    prompts = [tuple(random.integers(0, 37, length).tolist()) for length in lengths]
    return [Request(ids, 10 + q, a) for q, ids in enumerate(prompts) for a in range(answers)]


def sampling(**changes: Any) -> Sampling:
    return replace(Sampling(0.7, max_completion_length=9, stop=STOP, seed=4, step=2), **changes)


def sample(model, requests, how=None, batch_limit=64):
    return sample_with_transformers(model, requests, how or sampling(), version=6, batch_limit=batch_limit)


def full_log_probs(model, prompt, ids, temperature):
    """[len(ids), vocabulary]: one row, no cache, no mask."""
    row = torch.tensor([[*prompt, *ids]])
    logits = model(row, use_cache=False).logits[0, len(prompt) - 1 : -1].double() / temperature
    return (logits - logits.exp().sum(-1, keepdim=True).log()).numpy()


@pytest.mark.parametrize("name", CONFIGS)
def test_answers_have_the_log_probs_of_a_full_forward_pass(name):
    model = draw_model(name, dtype=torch.float64)
    requests = requests_of((1, 7, 7, 12, 3))
    answers = sample(model, requests)
    for request, answer in zip(requests, answers, strict=True):
        assert (answer.question, answer.answer) == (request.question, request.answer)
        full = full_log_probs(model, request.ids, answer.ids, 0.7)
        expected = full[np.arange(len(answer.ids)), list(answer.ids)]
        assert answer.log_probs.dtype == np.float32
        np.testing.assert_allclose(answer.log_probs, expected, rtol=0, atol=rounding(name))
        # the token is the one whose share of the distribution holds the uniform number of its position
        uniforms = draw_uniforms(sampling(), request, 9)[: len(answer.ids)]
        above = np.exp(full).cumsum(-1)[np.arange(len(answer.ids)), list(answer.ids)]
        slack = rounding(name)
        assert (uniforms < above + slack).all() and (uniforms > above - np.exp(expected) - slack).all()


@pytest.mark.parametrize("name", ["mimo", "window", "linear"])
@pytest.mark.parametrize("greedy", [False, True])
def test_answers_do_not_depend_on_the_other_rows(name, greedy):
    model, how = draw_model(name, seed=3, dtype=torch.float64), sampling(greedy=greedy)
    requests = requests_of((2, 11, 5, 5), answers=4)
    together = sample(model, requests, how)
    order = np.random.default_rng(0).permutation(len(requests))
    shuffled = sample(model, [requests[number] for number in order], how, batch_limit=5)
    for number, answer in zip(order, shuffled, strict=True):
        single = sample(model, [requests[number]], how)[0]
        assert answer.ids == together[number].ids == single.ids
        assert answer.finish_reason == together[number].finish_reason == single.finish_reason
        np.testing.assert_allclose(answer.log_probs, together[number].log_probs, atol=rounding(name))


def test_answers_to_one_question_differ_and_each_key_counts():
    model = draw_model("tied", dtype=torch.float64)
    (request,) = requests_of((4,), answers=1)
    changed = [
        (Request(request.ids, 11, 0), sampling(stop=())),
        (Request(request.ids, 10, 1), sampling(stop=())),
        (request, sampling(stop=(), seed=5)),
        (request, sampling(stop=(), step=3)),
        (request, sampling(stop=())),
    ]
    answers = {sample(model, [one], how)[0].ids for one, how in changed}
    assert len(answers) == len(changed)
    assert sample(model, [request], sampling(stop=()))[0].ids in answers


def test_an_answer_ends_with_the_first_stop_token_or_at_the_limit():
    model = draw_model("mimo", dtype=torch.float64)
    requests = requests_of((5,), answers=64)
    free = sample(model, requests, sampling(stop=(), max_completion_length=12))
    assert {len(answer.ids) for answer in free} == {12}
    for answer, longer in zip(sample(model, requests, sampling(max_completion_length=12)), free, strict=True):
        ends = [position for position, token in enumerate(longer.ids) if token in STOP]
        length = ends[0] + 1 if ends else 12
        assert answer.ids == longer.ids[:length]
        assert answer.finish_reason == ("stop" if ends else "length")
        assert answer.log_probs.shape == answer.versions.shape == (length,)
        assert answer.versions.dtype == np.int32 and set(answer.versions.tolist()) == {6}
    last = sample(model, requests, sampling(max_completion_length=1))
    assert [answer.finish_reason for answer in last] == [
        "stop" if answer.ids[0] in STOP else "length" for answer in last
    ]


def test_greedy_answers_are_the_likeliest_tokens_with_log_probs_at_the_temperature():
    model = draw_model("mimo", dtype=torch.float64)
    requests = requests_of((1, 6), answers=1)
    for request, answer in zip(requests, sample(model, requests, sampling(greedy=True)), strict=True):
        full = full_log_probs(model, request.ids, answer.ids, 0.7)
        assert answer.ids == tuple(full.argmax(-1).tolist())
        np.testing.assert_allclose(answer.log_probs, full.max(-1), atol=1e-6)


def test_frequencies_are_those_of_the_distribution():
    model = draw_model("tied", seed=5, dtype=torch.float64)
    ids, count, how = (1, 2, 3), 20_000, sampling(temperature=1.6, max_completion_length=1)
    answers = sample(model, [Request(ids, 0, number) for number in range(count)], how, batch_limit=7_000)
    seen = np.bincount([answer.ids[0] for answer in answers], minlength=37)
    expected = np.exp(full_log_probs(model, ids, (0,), 1.6)[0]) * count
    # chi-square with 36 degrees of freedom: beyond 80 in one of 30,000 trials
    assert ((seen - expected) ** 2 / expected).sum() < 80
    assert seen.min() > 0


def test_equal_prompts_are_computed_once_and_rows_that_ended_leave():
    model, shapes, positions = draw_model("mimo"), [], []
    forward = model.forward

    @functools.wraps(forward)
    def count(ids, **rest):
        shapes.append(tuple(ids.shape))
        positions.append(rest["position_ids"].numpy())
        return forward(ids, **rest)

    model.forward = count
    answers = sample(model, requests_of((6, 9), answers=40), sampling(max_completion_length=30), 80)
    assert shapes[0] == (2, 9)
    assert positions[0].tolist() == [[0, 0, 0, *range(6)], [*range(9)]], "rows count from their first token"
    assert set(positions[1].flatten()) == {6, 9}
    rows = [size for size, _ in shapes[1:]]
    lengths = np.array([len(answer.ids) for answer in answers])
    assert rows == sorted(rows, reverse=True) and rows[0] == 80
    for position, size in enumerate(rows, 1):
        going = (lengths > position).sum()
        assert going <= size and (size == 80 or going >= 0.5 * size)
    assert len(rows) == lengths.max() - 1


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_tokens_without_probability_are_never_drawn(data):
    size = data.draw(st.integers(2, 12))
    possible = data.draw(st.lists(st.booleans(), min_size=size, max_size=size).filter(any))
    number = st.floats(-30, 30, allow_nan=False)
    logits = torch.tensor(
        [[data.draw(number) if may else -torch.inf for may in possible]], dtype=torch.float32
    )
    uniform = data.draw(
        st.sampled_from([0.0, 0.5, 1 - 2**-53, 1.0])  # as a product is rounded
        | st.floats(0, 1, exclude_max=True)
    )
    tokens, log_probs = choose_tokens(logits, 0.9, torch.tensor([uniform], dtype=torch.float64))
    assert possible[int(tokens)]
    exact = logits[0].double() / 0.9
    torch.testing.assert_close(log_probs[0], exact[tokens[0]] - exact.exp().sum().log())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("is_greedy", [False, True])
def test_logits_that_are_not_finite_are_refused(value, is_greedy):
    logits = torch.zeros(3, 5)
    logits[1, 2] = value
    uniforms = None if is_greedy else torch.full((3,), 0.4, dtype=torch.float64)
    with pytest.raises(JobFailed, match="not finite"):
        choose_tokens(logits, 1.0, uniforms)


def test_random_numbers_of_a_longer_limit_begin_alike():
    request = Request((1,), 7, 3)
    long, short = (draw_uniforms(sampling(), request, count) for count in (500, 33))
    assert (long[:33] == short).all()
    assert long.min() >= 0 and long.max() < 1 and 0.4 < long.mean() < 0.6


def test_values_that_no_sampler_takes_are_refused_together():
    with pytest.raises(UsageError) as error:
        sampling(temperature=0.0, max_completion_length=0)
    assert [line.partition(":")[0] for line in error.value.violations] == [
        "temperature",
        "max_completion_length",
    ]
    for temperature in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError):
            sampling(temperature=temperature)
