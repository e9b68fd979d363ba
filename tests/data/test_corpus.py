"""From a recipe to batches: right tokens, disjoint parts, and the same run at any number of ranks."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bundle.checkpoints.state import list_data_changes
from bundle.data import Loader, cache, prepare
from bundle.data.store import open_store
from bundle.errors import UsageError
from bundle.recipe import load
from bundle.recipe.alignment import Alignment

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A file of 300 rows that serve pre-training and SFT."""
    random = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    texts = [" ".join(random.choice(WORDS, random.integers(2, 40))) for _ in range(300)]
    lines = [json.dumps({"text": t, "prompt": t[:20], "response": t[20:] or "ok"}) for t in texts]
    path.write_text("\n".join(lines))
    return path


def recipe(rows, *overrides, name="demo"):
    where = ["data.source=jsonl", f"data.path={rows}", "data.separator=null"]
    length = 256 if "task=sft" in overrides else 64
    return load(name, [*where, f"data.sequence_length={length}", "data.validation=0.1", *overrides])


def everything(samples, size):
    """All samples one by one, in `size` batches' worth of tensors."""
    return [samples.build_batch(np.asarray([number])) for number in range(size)]


def test_windows_are_the_running_text_shifted_by_one(rows, tmp_path):
    corpus = prepare(recipe(rows, "data.validation=0"), tmp_path)
    text = corpus.stores[0].ids.tolist()
    for number in (0, 3, len(corpus.training) - 1):
        batch = corpus.training.build_batch(np.asarray([number]))
        assert batch.ids[0].tolist() == text[number * 64 : number * 64 + 64]
        assert batch.labels[0].tolist() == text[number * 64 + 1 : number * 64 + 65]
    assert batch.loss_mask.sum() == 64 and batch.position_ids[0].tolist() == list(range(64))
    assert (batch.ids.dtype, batch.loss_mask.dtype) == (torch.int64, torch.float32)
    assert len(corpus.training) == (len(text) - 1) // 64


@pytest.fixture
def numbered(monkeypatch):
    """Every token is its own place in the store."""

    def opened(path):
        store = open_store(path)
        return store and replace(store, ids=np.arange(len(store.ids)))

    monkeypatch.setattr(cache, "open_store", opened)


@pytest.mark.usefixtures("numbered")
def test_a_window_learns_no_transition_over_a_piece_that_was_held_out(rows, tmp_path):
    corpus = prepare(recipe(rows, "data.validation=0.3", "data.sequence_length=16"), tmp_path)
    gaps = 0
    for samples in (corpus.training, corpus.validation["validation"]):
        for batch in everything(samples, len(samples)):
            follows = batch.labels == batch.ids + 1
            assert torch.equal(batch.loss_mask, follows.float())
            gaps += int((~follows).sum())
    assert gaps > 20


@pytest.mark.usefixtures("numbered")
@pytest.mark.parametrize("overrides", [(), ("task=sft",), ("data.packed=true", "train.micro_batch_size=1")])
def test_no_token_is_both_trained_on_and_held_out(rows, tmp_path, overrides):
    corpus = prepare(recipe(rows, *overrides), tmp_path)
    learned = []
    for samples in (corpus.training, corpus.validation["validation"]):
        batches = everything(samples, len(samples))
        learned.append([i for b in batches for i in b.labels[b.loss_mask > 0].tolist()])
    assert learned[0] and learned[1]
    assert len(set(learned[0] + learned[1])) == len(learned[0]) + len(learned[1])


@pytest.mark.parametrize(
    "overrides", [(), ("task=sft",), ("data.packed=true",), ("task=sft", "data.packed=true")]
)
def test_a_step_is_the_same_at_any_number_of_ranks_and_whenever_it_is_reached(rows, tmp_path, overrides):
    made = recipe(rows, *overrides, "train.micro_batch_size=1", "train.global_batch_size=8")
    corpus = prepare(made, tmp_path)

    def step(consumed, dp):
        ranks = [
            Loader(made, prepare(made, tmp_path), rank, dp).read_training_step(consumed) for rank in range(dp)
        ]
        return sorted(tuple(b.ids.flatten().tolist()) for batches in ranks for b in batches)

    for consumed in (0, 8, 8 * 40):
        assert step(consumed, 1) == step(consumed, 2) == step(consumed, 4)
        assert len(step(consumed, 2)) == 8
    assert step(0, 1) != step(8, 1)
    assert len(corpus.training) > 16


def test_an_evaluation_takes_every_held_out_sample_once_on_any_number_of_ranks(rows, tmp_path):
    made = recipe(rows, "task=sft", "train.micro_batch_size=2", "train.global_batch_size=16")
    corpus = prepare(made, tmp_path)
    for dp in (1, 2, 8):
        shares = [Loader(made, corpus, rank, dp).read_validation()["validation"] for rank in range(dp)]
        assert len({len(share) for share in shares}) == 1
        real = [row for share in shares for b in share for row in b.loss_mask if row.sum()]
        assert len(real) == len(corpus.validation["validation"]) == 30
    assert Loader(made, prepare(recipe(rows, "data.validation=0"), tmp_path), 0, 1).read_validation() == {}


def test_rows_are_filled_up_and_only_responses_count(rows, tmp_path):
    corpus = prepare(recipe(rows, "task=sft"), tmp_path)
    batch = corpus.training.build_batch(np.asarray([0, 1, 2]))
    given = [json.loads(line) for line in Path(rows).read_text().splitlines()]
    responses = {row["response"] + "\n" for row in given}
    for labels, mask in zip(batch.labels, batch.loss_mask, strict=True):
        learned = labels[mask > 0].tolist()
        assert learned[-1] == 256 and bytes(learned[:-1]).decode() in responses
    assert batch.ids.shape == (3, 256)


def test_learning_the_last_turn_alone_is_other_data(tmp_path):
    talk = [{"role": role, "content": role * 5} for role in ("user", "assistant") * 2]
    path = tmp_path / "talks.jsonl"
    path.write_text("\n".join([json.dumps({"messages": talk})] * 20))
    made = [
        prepare(recipe(path, "task=sft", f"data.learn={learn}"), tmp_path / "cache")
        for learn in ("all_turns", "last_turn")
    ]
    counts = [int(each.training.build_batch(np.asarray([0])).loss_mask.sum()) for each in made]
    assert counts[0] == 2 * counts[1] > 0
    assert len(list_data_changes(made[0].identity, made[1].identity)) == 1


@pytest.mark.parametrize("sft", [False, True])
def test_packs_fit_every_layout_and_are_the_same_at_each(rows, tmp_path, sft):
    task = ["task=sft"] if sft else []
    packs = []
    for cp in (1, 2, 4):
        overrides = [f"parallel.cp={cp}", "data.sequence_length=512", *task]
        made = recipe(rows, *overrides, name="qwen3-cp2-packed")
        batches = everything(prepare(made, tmp_path).training, 10)
        for batch in batches:
            assert batch.lengths is not None and batch.ids.shape == (1, sum(batch.lengths))
            assert Alignment("thd", cp=cp).pad(batch.lengths, length=512).total_rows_over_cp_ranks == 512
        packs.append([(b.lengths, b.ids.tolist()) for b in batches])
    assert packs[0] == packs[1] == packs[2]
    assert any(len(lengths) > 2 for lengths, _ in packs[0])


def test_inside_a_pack_sequences_are_whole_and_do_not_predict_each_other(rows, tmp_path):
    made = recipe(rows, "data.sequence_length=512", "data.validation=0", name="qwen3-cp2-packed")
    corpus = prepare(made, tmp_path)
    texts = {json.loads(line)["text"] for line in Path(rows).read_text().splitlines()}
    for batch in everything(corpus.training, len(corpus.training)):
        assert batch.lengths is not None
        parts = zip(
            *(
                t[0].split(batch.lengths)
                for t in (batch.ids, batch.labels, batch.loss_mask, batch.position_ids)
            ),
            strict=True,
        )
        for ids, labels, mask, positions in parts:
            assert ids[-1] == 256 and bytes(ids[:-1].tolist()).decode() in texts
            assert labels[:-1].tolist() == ids[1:].tolist()
            assert mask.tolist() == [1.0] * (len(ids) - 1) + [0.0]
            assert positions.tolist() == list(range(len(ids)))


def test_packs_that_a_layout_makes_otherwise_are_other_data(rows, tmp_path, messages):
    def made(cp):
        overrides = [f"parallel.cp={cp}", "data.sequence_length=480"]
        return prepare(recipe(rows, *overrides, name="qwen3-cp2-packed"), tmp_path)

    def packs(cp):
        return [batch.lengths for batch in everything(made(cp).training, 10)]

    for cp in (1, 4, 8):
        assert list_data_changes(made(2).identity, made(cp).identity) == [] and packs(2) == packs(cp)
    assert packs(2) != packs(3)
    (line,) = list_data_changes(made(2).identity, made(3).identity)
    assert "parallel.cp" in line and re.findall(r"\d+", line) == ["480", "16", "480", "48"]
    messages(line)


def test_changed_data_is_named(rows, tmp_path, messages):
    made = recipe(rows)
    before = prepare(made, tmp_path).identity
    assert list_data_changes(before, prepare(made, tmp_path).identity) == []
    copy = tmp_path / "copy.jsonl"
    copy.write_text(Path(rows).read_text().replace("fox", "cat"))
    (line,) = list_data_changes(before, prepare(recipe(copy), tmp_path).identity)
    assert line.startswith("data tokens: was ")
    shuffled_otherwise = {name: value for name, value in before.items() if name != "order"}
    (line,) = list_data_changes(shuffled_otherwise, before)
    assert line.startswith("data order: ") and "numpy.random.RandomState" in line
    messages(line)
    (line,) = list_data_changes({"stdlib": "CPython 3.12.1"}, {"stdlib": "CPython 3.11.7"})
    assert line.startswith("data stdlib: ") and re.findall(r"3\.\d+\.\d", line) == ["3.12.1", "3.11.7"]


def test_only_running_text_of_bytes_has_a_bigram_entropy(rows, tmp_path):
    assert prepare(recipe(rows), tmp_path / "text").conditional_byte_entropy_nats is not None
    assert prepare(recipe(rows, "task=sft"), tmp_path / "chats").conditional_byte_entropy_nats is None


def test_too_little_data_says_what_to_do(tmp_path, messages):
    (tmp_path / "a.jsonl").write_text('{"text": "short"}')
    with pytest.raises(UsageError, match="sequence_length") as error:
        prepare(recipe(tmp_path / "a.jsonl"), tmp_path / "cache")
    messages(error.value)


def test_sequences_that_are_too_long_for_sft_are_named_not_cut(rows, tmp_path):
    with pytest.raises(UsageError) as caught:
        prepare(recipe(rows, "task=sft", "data.sequence_length=32"), tmp_path)
    (said,) = caught.value.violations
    assert said.startswith(f"{rows}:1 (") and " 32 tokens" in said


def test_the_demo_reads_the_standard_library(tmp_path):
    corpus = prepare(load("demo"), tmp_path)
    assert corpus.tokens > 5_000_000 and corpus.left_out.skipped_rows == ()
    assert corpus.identity["stdlib"].startswith("CPython")
    assert corpus.conditional_byte_entropy_nats == pytest.approx(2.42, abs=0.03)
    share = len(corpus.validation["validation"]) / (
        len(corpus.training) + len(corpus.validation["validation"])
    )
    assert share == pytest.approx(0.02, abs=0.001)
