"""What `check` says of a recipe's data, against counts made by hand."""

import json
import random
import re

import pytest

from tests.command import run_bundle

pytest.importorskip("torch")

import torch

from bundle.data import Loader, prepare
from bundle.data.corpus import decode_first_samples, decode_with_learned_brackets, inspect
from bundle.data.samples import SampleBatch
from bundle.data.tokenizers import ByteTokenizer
from bundle.recipe import load

TURNS = [("What is 2+2?", "Four."), ("And 3+3?", "Six."), ("Hi", "Hello, world.")]


def rows(path, *conversations):
    def message(turns):
        return [
            {"role": role, "content": text}
            for user, assistant in turns
            for role, text in (("user", user), ("assistant", assistant))
        ]

    path.write_text("".join(json.dumps({"messages": message(turns)}) + "\n" for turns in conversations))
    return path


def job(path, *overrides):
    few = ("train.global_batch_size=2", "train.micro_batch_size=1", "data.validation=0")
    return load("demo", ["task=sft", "data.source=jsonl", f"data.path={path}", *few, *overrides])


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_learned_stands_in_brackets(tmp_path, packed):
    path = rows(tmp_path / "chat.jsonl", TURNS[:2], TURNS[2:])
    recipe = job(path, "data.sequence_length=256", f"data.packed={str(packed).lower()}")
    shown = decode_first_samples(recipe, prepare(recipe, tmp_path / "data"), 3)
    two = "### User\nWhat is 2+2?\n### Assistant\n⟦Four.\n<end>⟧"
    two += "### User\nAnd 3+3?\n### Assistant\n⟦Six.\n<end>⟧"
    one = "### User\nHi\n### Assistant\n⟦Hello, world.\n<end>⟧"
    if packed:  # both in one pack, which is the only sample and comes twice
        assert shown == [f"{two}\n\n{one}"] * 2
    else:
        assert sorted(shown) == sorted([two, one])


def test_the_samples_are_those_of_step_1(tmp_path):
    many = [[("q", f"answer {number}")] for number in range(40)]
    recipe = job(rows(tmp_path / "chat.jsonl", *many), "train.global_batch_size=8")
    corpus = prepare(recipe, tmp_path / "data")
    step = [
        decode_with_learned_brackets(batch, corpus.tokenizer)
        for batch in Loader(recipe, corpus, 0, 1).read_training_step(0)
    ]
    assert decode_first_samples(recipe, corpus, 5) == step[:5] and len(set(step)) == 8


def test_running_text_is_learned_but_for_its_first_token():
    text = b"to be or not"
    ids = torch.tensor([list(text)])
    batch = SampleBatch(ids[:, :-1], ids[:, 1:], torch.ones(1, len(text) - 1), ids[:, :-1])
    assert decode_with_learned_brackets(batch, ByteTokenizer()) == "t⟦o be or not⟧"


def test_a_long_sample_is_cut_and_says_so():
    ids = torch.full((1, 1001), ord("a"))
    batch = SampleBatch(ids[:, :-1], ids[:, 1:], torch.zeros(1, 1000), ids[:, :-1])
    assert decode_with_learned_brackets(batch, ByteTokenizer()) == "a" * 400 + " ... 601 tokens more"
    lengths = (300, 300, 200, 200)
    packed = SampleBatch(ids[:, :-1], ids[:, 1:], torch.zeros(1, 1000), ids[:, :-1], lengths)
    assert decode_with_learned_brackets(packed, ByteTokenizer()).split("\n\n")[1:] == [
        "a" * 300,
        "... 2 sequences more",
    ]


def test_counts(tmp_path):
    drawn = random.Random(7)
    many = [[(("q" * drawn.randint(1, 9)), "a" * drawn.randint(1, 30))] for _ in range(53)]
    recipe = job(rows(tmp_path / "chat.jsonl", *many), "data.validation=0.2", "train.steps=33")
    found = inspect(recipe, prepare(recipe, tmp_path / "data"))
    turns = [f"### User\n{q}\n### Assistant\n" for ((q, _),) in many]
    answers = [len(a) + 2 for ((_, a),) in many]  # and a line's end, and the end
    tokens = sum(map(len, turns)) + sum(answers)
    assert (found.documents, found.tokens, found.learned) == (53, tokens, sum(answers))
    assert found.training + found.held_out == 53 and 0 < found.held_out < 27
    assert found.filled == tokens / (53 * recipe.data.sequence_length)
    assert found.steps_per_epoch == found.training / 2 and found.epochs == 33 * 2 / found.training


def check(*words):
    return run_bundle("check", *words, timeout=60)


@pytest.mark.processes
def test_the_verb_reads_leaves_the_tokens_and_tells_bad_rows(tmp_path, messages):
    path = rows(tmp_path / "chat.jsonl", TURNS, TURNS)
    path.write_text(path.read_text() + '{"messages": [{"role": "user", "content": "x"}]}\n')
    sets = ("task=sft", "data.source=jsonl", f"data.path={path}", "data.validation=0", "data.on_error=skip")
    words = [word for override in sets for word in ("--set", override)]
    directory = ("--run-directory", tmp_path / "run")
    done = check("demo", *words, *directory, "--samples", 1)
    assert done.returncode == 0, done.stderr
    (counts,) = [line for line in done.stdout.splitlines() if line.startswith("documents ")]
    assert re.findall(r"\d+", counts) == ["2", "1"]
    messages(counts)
    assert "⟦Hello, world." in done.stdout and "free for" in done.stdout and "chat.jsonl:3" in done.stderr
    assert [path.name for path in (tmp_path / ".tokens").glob("tokens-*/tokens.bin")] == ["tokens.bin"]
    found = json.loads(check("demo", *words, *directory, "--json", "--samples", 0).stdout)
    assert (found["documents"], found["skipped"], found["samples"]) == (2, 1, [])
    assert found["formats"] == {"openai (messages)": 2}
    assert "rows       openai (messages): 2\n" in done.stdout
    assert found["disk"]["checkpoints"] == 3 * found["disk"]["checkpoint"] > 0 and found["disk"]["free"] > 0


def test_what_is_not_there_is_told_like_by_plan(tmp_path, messages):
    sets = ("--set", "data.path=nothing.txt", "--set", "data.tokenizer=hf:nowhere")
    done = check("demo", *sets, "--run-directory", tmp_path / "run")
    assert (
        done.returncode == 2 and "nothing.txt" in done.stderr and "data.tokenizer: 'nowhere'" in done.stderr
    )
    messages(done.stderr)
    assert not (tmp_path / "run").exists()
