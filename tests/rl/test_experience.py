"""Answers as micro-batches, against what a loop over single sequences makes of them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

from bundle.recipe import Recipe, from_mapping
from bundle.rl.experience import BatchBuilder, Experience, find_token_indices_and_lengths

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


def recipe(*, packed: bool, size: int = 3, **parallel: Any) -> Recipe:
    return from_mapping(
        {
            "name": "experience",
            "model": {"config": CONFIG, "dtype": "fp32", "mtp": {"layers": 1}},
            "parallel": parallel,
            "data": {
                "source": "text",
                "path": ["none"],
                "tokenizer": "bytes",
                "sequence_length": 48,
                "packed": packed,
            },
            "train": {"steps": 2, "global_batch_size": 12, "micro_batch_size": 1 if packed else size},
            "optimizer": {"warmup_steps": 0},
        }
    )


def groups(dp: int = 1, rank: int = 0, pp: int = 1, vpp: int = 1) -> Any:
    def axis(size: int = 1, rank: int = 0) -> SimpleNamespace:
        return SimpleNamespace(size=size, rank=rank)

    return SimpleNamespace(dp=axis(dp, rank), cp=axis(), pp=axis(pp), vpp=vpp)


def draw(generator: np.random.Generator, count: int) -> tuple[list[list[int]], list[list[int]]]:
    def tokens(most: int) -> list[list[int]]:
        return [generator.integers(1, 300, generator.integers(1, most)).tolist() for _ in range(count)]

    return tokens(20), tokens(27)


def build(questions: list[list[int]], answers: list[list[int]], generator: np.random.Generator) -> Any:
    values = [generator.normal(size=len(answer)).astype(np.float32) for answer in answers]
    return Experience.from_answers(questions, answers).with_values(advantages=values), values


def list_learned(micro_batches: list[Any]) -> list[tuple[int, int, float]]:
    """(token before, learned token, value) of every token that is learned, sorted."""
    rows = []
    for one in micro_batches:
        mask = one.loss_mask > 0
        assert not one.extra_tensors["advantages"][~mask].any()
        columns = (one.ids[mask], one.labels[mask], one.extra_tensors["advantages"][mask])
        rows += list(zip(*(column.tolist() for column in columns), strict=True))
    return sorted(rows)


@pytest.mark.parametrize("packed", [True, False])
@given(seed=st.integers(0, 2**32), count=st.integers(1, 23), dp=st.integers(1, 4))
def test_every_learned_token_is_on_one_rank_with_its_value(packed, seed, count, dp):
    generator = np.random.default_rng(seed)
    questions, answers = draw(generator, count)
    experience, values = build(questions, answers, generator)
    numbers = np.flatnonzero(generator.random(count) < 0.7)
    seen, counts, loads = [], set(), []
    for rank in range(dp):
        builder = BatchBuilder(recipe(packed=packed), groups(dp, rank), torch.device("cpu"), 1.0)
        plan = builder.plan(experience.lengths, numbers)
        micro_batches = builder.build(experience, plan, ["advantages"])
        counts.add(len(micro_batches))
        loads.append(sum(int(one.loss_mask.numel()) for one in micro_batches))
        seen += list_learned(micro_batches)
        for one in micro_batches:
            assert one.temperature is None
            assert one.input_shape[0] <= 48 if packed else one.rows == 3
    assert len(counts) == 1 and counts != {0}
    wanted = []
    for number in numbers:
        tokens, first = [*questions[number], *answers[number]], len(questions[number])
        wanted += [
            (tokens[first + i - 1], tokens[first + i], float(value)) for i, value in enumerate(values[number])
        ]
    assert sorted(seen) == sorted(wanted)


@given(seed=st.integers(0, 2**32), packed=st.booleans(), vpp=st.sampled_from([1, 2]))
def test_stages_exchange_one_shape_and_interleaved_ones_take_a_multiple(seed, packed, vpp):
    generator = np.random.default_rng(seed)
    questions, answers = draw(generator, 9)
    experience, _ = build(questions, answers, generator)
    shapes, counts = set(), set()
    for rank in range(2):
        builder = BatchBuilder(recipe(packed=packed), groups(2, rank, 2, vpp), torch.device("cpu"), 0.7)
        micro_batches = builder.build(experience, builder.plan(experience.lengths, np.arange(9)))
        shapes |= {(one.rows, one.sequence_length) for one in micro_batches}
        counts.add(len(micro_batches))
        for one in micro_batches:
            learned = one.loss_mask > 0
            assert one.temperature is not None
            assert torch.equal(one.temperature[learned], torch.full((int(learned.sum()),), 0.7))
    assert len(shapes) == len(counts) == 1
    assert vpp == 1 or counts.pop() % 2 == 0


@given(seed=st.integers(0, 2**32))
def test_values_come_back_as_they_were_for_each_answer(seed):
    generator = np.random.default_rng(seed)
    questions, answers = draw(generator, 7)
    experience, values = build(questions, answers, generator)
    for back, value in zip(
        experience.extract_answer_values(experience.values["advantages"]), values, strict=True
    ):
        np.testing.assert_array_equal(back, value)
    assert experience.loss_mask.sum() == sum(map(len, answers))
    assert (experience.values["advantages"] != 0).sum() <= experience.loss_mask.sum()


def test_places_cover_each_planned_sequence_once_and_padding_is_behind_all():
    experience = Experience.from_answers([[1, 2], [3], [4, 5, 6]], [[7], [8, 9], [10]])
    builder = BatchBuilder(recipe(packed=False, size=4), groups(), torch.device("cpu"), 1.0)
    plan = builder.plan(experience.lengths, np.array([2, 0]))
    ((places, lengths),) = find_token_indices_and_lengths(experience, plan)
    assert sorted(lengths.tolist()) == [1, 1, 3, 4]
    assert sorted(places.tolist()) == [0, 1, 2, 6, 7, 8, 9, 10, 10]
    (one,) = builder.build(experience, plan)
    assert int(one.learned_tokens) == 2


def test_long_and_short_answers_are_balanced_over_ranks():
    generator = np.random.default_rng(0)
    answers = [generator.integers(1, 300, size).tolist() for size in (27, 26, 25, 24, 2, 3, 4, 5)]
    experience = Experience.from_answers([[1]] * 8, answers)
    loads = []
    for rank in range(2):
        builder = BatchBuilder(recipe(packed=False, size=1), groups(2, rank), torch.device("cpu"), 1.0)
        micro_batches = builder.build(experience, builder.plan(experience.lengths, np.arange(8)))
        loads.append(sum(one.loss_mask.shape[1] for one in micro_batches))
    assert abs(loads[0] - loads[1]) <= 4


def test_rows_of_like_length_share_a_micro_batch():
    answers = [[1] * size for size in (2, 26, 3, 25, 2, 27)]
    experience = Experience.from_answers([[1]] * 6, answers)
    builder = BatchBuilder(recipe(packed=False, size=3), groups(), torch.device("cpu"), 1.0)
    micro_batches = builder.build(experience, builder.plan(experience.lengths, np.arange(6)))
    assert sorted(one.loss_mask.shape[1] for one in micro_batches) == [4, 28]
