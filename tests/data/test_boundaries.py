"""Where what is learned begins and ends, by a trained tokenizer whose merges cross the boundary."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from bundle.data.chat import ChatTemplate
from bundle.data.conversations import read_conversation
from bundle.data.tokenizers import HuggingFaceTokenizer
from bundle.recipe.data import Data
from tests.data import chat

DATA = Data(source="jsonl", path=("rows.jsonl",), sequence_length=64)
# What is said of a turn begins with a blank or not, ends at the next turn, and repeats in training.
_PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_MARKED = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ANSWERS = ("yes", "no", "yes it is", "ünï", "4")
QUESTIONS = ("is it", "what", "1+1")


def talk(turns):
    roles = (
        ("user", question) if at % 2 == 0 else ("assistant", question) for at, question in enumerate(turns)
    )
    return [{"role": role, "content": text} for role, text in roles]


TALKS = [talk((q, a, q, b)) for q, a, b in itertools.product(QUESTIONS, ANSWERS, ANSWERS)]


def train(directory: Path, template: str) -> HuggingFaceTokenizer:
    """A byte-level BPE tokenizer, trained on such conversations; it joins across words and lines."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<end>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = [f"assistant: {answer}\nuser: {question}\n" for answer in ANSWERS for question in QUESTIONS]
    raw.train_from_iterator(lines * 3, trainer)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")
    made.chat_template = template
    made.save_pretrained(directory)
    return HuggingFaceTokenizer(directory)


def starts(made: HuggingFaceTokenizer, ids: list[int]) -> list[int]:
    """The byte at which each token begins, by decoding what stands before it."""
    tokens = made._tokenizer.convert_ids_to_tokens(ids)
    return list(itertools.accumulate(map(len, tokens[:-1]), initial=0))  # a character is a byte


def test_without_marks_a_token_that_begins_in_the_prompt_is_not_learned(tmp_path):
    made, crossing = train(tmp_path, _PLAIN), 0
    template = ChatTemplate(made)
    for messages in TALKS:
        (document,) = template.encode(chat.drafts(template, read_conversation({"messages": messages}, DATA)))
        ids, expected = document.ids.tolist(), np.zeros(len(document.ids), np.bool_)
        places = starts(made, ids)
        for turn in (1, 3):
            before = made._tokenizer.apply_chat_template(
                messages[:turn], tokenize=False, add_generation_prompt=True
            )
            after = made._tokenizer.apply_chat_template(messages[: turn + 1], tokenize=False)
            begin, end = (len(text.encode()) for text in (before, after))
            expected |= np.array([begin <= place < end for place in places])
            crossing += begin not in places
        assert np.asarray(document.loss_mask).tolist() == expected.tolist(), messages
        assert ids == made._tokenizer(made.decode(ids), add_special_tokens=False)["input_ids"]
    assert crossing > len(TALKS) / 2, "the tokenizer joins nothing across the boundary"


def test_with_marks_the_tokens_are_those_of_transformers(tmp_path):
    made, crossing = train(tmp_path, _MARKED), 0
    template = ChatTemplate(made)
    for messages in TALKS:
        (document,) = template.encode(chat.drafts(template, read_conversation({"messages": messages}, DATA)))
        theirs = made._tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        assert document.ids.tolist() == theirs["input_ids"]
        assert np.asarray(document.loss_mask).tolist() == list(map(bool, theirs["assistant_masks"])), messages
        before = made._tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        crossing += len(before.encode()) not in starts(made, document.ids.tolist())
    assert crossing > len(TALKS) / 2, "the tokenizer joins nothing across the boundary"
