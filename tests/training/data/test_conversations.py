"""SFT: what is written, and that only the assistant's words are learned."""

import pytest

from bundle.errors import UsageError
from bundle.recipe.sections import Fields
from bundle.training.data.conversations import messages_of, plain, templated
from bundle.training.data.tokenizers import Bytes, HuggingFace, tokenizer

TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'assistant' %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETFUL = TEMPLATE.replace(
    "{{ m.content }}", "{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% endif %}"
)


def text(ids):
    return bytes(i for i in ids.tolist() if i < 256).decode()


def test_plain_conversations_have_headings_and_an_end_after_each_answer():
    ids, learned = plain(TALK, Bytes())
    assert (
        text(ids)
        == "### System\nBe short.\n### User\n1+1?\n### Assistant\n2\n### User\n2+2?\n### Assistant\n4\n"
    )
    assert text(ids[learned]) == "2\n4\n"
    assert ids[learned].tolist().count(256) == 2 and ids[-1] == 256


def test_prompt_and_response_are_a_conversation_of_two():
    fields = Fields(prompt="question", response="answer")
    assert messages_of({"question": "q", "answer": "a"}, fields) == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    assert messages_of({"messages": TALK, "answer": 3}, fields) == TALK


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": "x"}, "field response: missing; the row has prompt"),
        ({"prompt": 1, "response": "x"}, "field prompt: must be text"),
        ({"prompt": "x", "response": " "}, "field response: must be text"),
        ({"messages": None}, "field messages: must be a list"),
        ({"messages": []}, "field messages: must be a list"),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            "field messages[0]: must be an object with a role",
        ),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "field messages[0]: content must be text"),
        ({"messages": TALK[:2]}, "must end with what the assistant says"),
    ],
)
def test_rows_that_are_no_conversation_are_named_by_field(row, named):
    found = messages_of(row, Fields())
    assert isinstance(found, str) and named in found


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A real tokenizer of `transformers` with one token per byte, saved to a directory."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    raw = tokenizers.Tokenizer(model)
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    path = tmp_path_factory.mktemp("tokenizer")
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")
    made.chat_template = TEMPLATE
    made.save_pretrained(path)
    return path


def test_a_chat_template_writes_and_the_answers_are_found_in_it(directory):
    made = HuggingFace(directory)
    written = templated(TALK, made)
    assert not isinstance(written, str)
    ids, learned = written
    decode = made._tokenizer.decode
    assert decode(ids.tolist()) == "<system>Be short.<user>1+1?<assistant>2<end><user>2+2?<assistant>4<end>"
    assert decode(ids[learned].tolist()) == "2<end>4<end>"


def test_a_template_that_rewrites_earlier_turns_is_refused(directory):
    made = HuggingFace(directory)
    made._tokenizer.chat_template = FORGETFUL
    assert "message 2: the chat template writes it differently" in str(templated(TALK, made))


def test_tokenizers_are_named_by_their_content_and_must_fit_the_model(directory):
    made = tokenizer(f"hf:{directory}", 1000)
    assert made.identity == HuggingFace(directory).identity and made.identity.startswith("hf sha256:")
    assert made.end_of_text == 256 and made.vocab_size == 257
    with pytest.raises(UsageError, match="has 257 tokens, the model's vocab_size is 200"):
        tokenizer(f"hf:{directory}", 200)


@pytest.mark.parametrize("name", ["hf:/nowhere", "hf:{empty}"])
def test_directories_without_a_tokenizer_are_usage_errors(name, tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(UsageError, match=r"data\.tokenizer"):
        tokenizer(name.format(empty=tmp_path), 1000)
