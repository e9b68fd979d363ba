"""Rows whose earlier turns a chat template rewrites: a sample for each turn, and rows are counted as before.

The oracle is transformers' own apply_chat_template over beginnings of the conversation, token by token.
"""

import json
import re
from typing import Any

import numpy as np
import pytest

from bundle.data import prepare, store
from bundle.data.chat import ChatTemplate
from bundle.data.conversations import read_conversation
from bundle.data.corpus import inspect
from bundle.data.media import Medium
from bundle.data.sources import DataErrors
from bundle.data.store import RowChunk, TokenDocument, open_store, write_store
from bundle.data.tokenizers import HuggingFaceTokenizer
from bundle.errors import UsageError
from bundle.recipe import load
from bundle.recipe.data import Data
from tests.data import chat

DATA = Data(source="jsonl", path=("rows.jsonl",), sequence_length=64)
ROWS = 20


def talk(turns, name=""):
    pairs = ((f"{name}{turn}?", f"<think>\n{turn}\n</think>\n\n{name}{turn}.") for turn in range(turns))
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def ids(made, messages, **options):
    whole = made._tokenizer.apply_chat_template(messages, return_dict=True, **options)
    return whole["input_ids"]


def expected(made, messages):
    """The tokens of each turn's sample, and how many of them are its prompt."""
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    ends = [ids(made, messages[: turn + 1]) for turn in turns]
    return [
        (end, len(ids(made, messages[:turn], add_generation_prompt=True)))
        for turn, end in zip(turns, ends, strict=True)
    ]


@pytest.mark.parametrize("template", [chat.THOUGHTFUL, chat.THINKING])
def test_each_turn_is_learned_in_a_sample_that_ends_with_it(tmp_path, template):
    made = HuggingFaceTokenizer(chat.directory(tmp_path, template))
    writes, messages = ChatTemplate(made), talk(3)
    documents: Any = list(writes.encode(chat.drafts(writes, read_conversation({"messages": messages}, DATA))))
    assert len(documents) == 3
    for document, (whole, prompt) in zip(documents, expected(made, messages), strict=True):
        assert document.ids.tolist() == whole
        assert np.flatnonzero(document.loss_mask).tolist() == list(range(prompt, len(whole)))


def test_turns_that_stay_as_they_are_share_a_sample(tmp_path):
    """A turn after a tool's answer goes on with the thoughts that were there; a new question ends them."""
    made = HuggingFaceTokenizer(chat.directory(tmp_path, chat.THOUGHTFUL))
    steps = [{"role": "tool", "content": "2"}, {"role": "assistant", "content": "<think>\nb\n</think>\n\n2"}]
    messages = [*talk(1), *steps, *talk(2)[2:]]
    writes = ChatTemplate(made)
    samples = chat.drafts(writes, read_conversation({"messages": messages}, DATA))
    assert [text for text, _ in samples] == [made.decode(ids(made, messages[:end])) for end in (4, 6)]
    learned = [[text[begin:end] for begin, end in parts] for text, parts in samples]
    assert learned == [
        ["<think>\n0\n</think>\n\n0.<end>", "<think>\nb\n</think>\n\n2<end>"],
        ["<think>\n1\n</think>\n\n1.<end>"],
    ]
    messages[1]["weight"] = messages[3]["weight"] = 0
    assert len(chat.drafts(writes, read_conversation({"messages": messages}, DATA))) == 1


def test_a_sample_has_the_images_of_the_messages_that_it_shows(tmp_path):
    messages = talk(3)
    for index, marks in ((0, "<image>"), (4, "<image><image>")):
        messages[index]["content"] = marks + messages[index]["content"]
    source = chat.THOUGHTFUL.replace("{{ m.content }}", "{{ m.content | string }}")
    writes = ChatTemplate(HuggingFaceTokenizer(chat.directory(tmp_path, source)))
    row = read_conversation({"messages": messages, "images": ["a", "b", "c"]}, DATA)
    drafts: Any
    (drafts,) = writes.draft([writes.prepare_render_request(row)])
    every = [Medium("image", name) for name in "abc"]
    assert [list(media) for _, media in drafts] == [every[:1], every[:1], every]


@pytest.fixture
def recipe(tmp_path):
    made = chat.directory(tmp_path / "tokenizer", chat.THOUGHTFUL)
    rows = tmp_path / "rows.jsonl"
    lines = [{"messages": talk(1 + number % 3, f"{number:02} ")} for number in range(ROWS)]
    rows.write_text("\n".join(map(json.dumps, lines)))

    def of(*overrides):
        keys = [f"data.tokenizer=hf:{made}", f"data.path={rows}", "data.source=jsonl", "data.template=chat"]
        keys += ["task=sft", "data.separator=null", "model.config.vocab_size=512", "data.sequence_length=256"]
        return load("demo", [*keys, *overrides])

    return of


@pytest.mark.parametrize("packed", ["true", "false"])
def test_samples_of_a_row_are_counted_and_held_out_together(recipe, tmp_path, packed):
    job = recipe("data.validation=0.3", f"data.packed={packed}", "train.micro_batch_size=1")
    corpus = prepare(job, tmp_path / "tokens")
    counts = inspect(job, corpus)
    samples = sum(1 + number % 3 for number in range(ROWS))
    assert (counts.rows, counts.documents) == (ROWS, samples)
    (made,) = corpus.stores
    assert np.bincount(made.document_row_numbers).tolist() == [1 + number % 3 for number in range(ROWS)]

    def rows(samples):
        batches = [samples.build_batch(np.array([number])) for number in range(len(samples))]
        texts = [corpus.tokenizer.decode(batch.ids[0].tolist()) for batch in batches]
        return {name for text in texts for name in re.findall(r"<user>(\d\d)", text)}

    held, trained = rows(corpus.validation["validation"]), rows(corpus.training)
    assert not held & trained and len(held) == round(0.3 * ROWS) and len(held | trained) == ROWS


def test_a_row_that_is_too_long_keeps_the_samples_that_still_teach_something(recipe, tmp_path):
    whole: Any
    (whole,) = prepare(recipe("data.validation=0"), tmp_path / "whole").stores
    longest = int(whole.lengths.argmax())  # of which the cut leaves no learned token
    learned = whole.loss_mask[whole.document_starts[longest] :][: whole.lengths[longest]]
    room = int(np.flatnonzero(learned)[0])
    keys = ("data.validation=0", "data.truncation=right", f"data.sequence_length={room}")
    corpus = prepare(recipe(*keys), tmp_path / "cut")
    three = sum(number % 3 == 2 for number in range(ROWS))
    assert corpus.left_out.cut >= three and corpus.left_out.deleted == 0
    assert len(corpus.stores[0].lengths) == len(whole.lengths) - three


def test_an_answer_of_a_pair_is_one_sample(tmp_path, recipe):
    pairs = tmp_path / "rows.jsonl"
    row = {"chosen": talk(2), "rejected": [*talk(1)[:1], {"role": "assistant", "content": "no"}]}
    pairs.write_text(json.dumps(row))
    keys = ("task=dpo", "data.validation=0")
    with pytest.raises(UsageError) as caught:
        prepare(recipe(*keys), tmp_path / "tokens")
    assert "last_turn" in caught.value.violations[0]
    prepare(recipe(*keys, "data.learn=last_turn"), tmp_path / "tokens")


def test_rows_of_several_documents_are_known_after_an_interruption(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "COMMIT_SECONDS", 0.0)

    def chunks(first, until=9):
        for number in range(first, 9):
            if number == until:
                raise KeyboardInterrupt  # as a kill, it leaves what there is
            document = TokenDocument(np.arange(number + 1, dtype=np.uint32), np.ones(number + 1, np.bool_))
            yield RowChunk([[document], [document] * (1 + number % 3)], DataErrors("stop").dump())

    def make(name, chunks):
        write_store(tmp_path / name, 300, chunks, DataErrors("stop"), lambda _: None)

    make("whole", chunks)
    with pytest.raises(KeyboardInterrupt):
        make("begun", lambda first: chunks(first, 5))
    make("begun", chunks)
    whole: Any
    begun: Any
    whole, begun = (open_store(tmp_path / name) for name in ("whole", "begun"))
    sizes = [size for number in range(9) for size in (1, 1 + number % 3)]
    assert (
        np.bincount(whole.document_row_numbers).tolist()
        == np.bincount(begun.document_row_numbers).tolist()
        == sizes
    )
    assert whole.facts == begun.facts
