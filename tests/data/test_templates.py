"""Chat templates as models have them: what is learned, and what becomes a row's or the job's problem."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from bundle.data import prepare
from bundle.data.chat import ChatTemplate, build_writer
from bundle.data.conversations import read_conversation
from bundle.data.prompts import PromptBuilder
from bundle.data.sources import CorruptData
from bundle.data.tokenizers import HuggingFaceTokenizer
from bundle.errors import UsageError
from bundle.recipe import load
from bundle.recipe.data import Data
from tests.data import chat

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")


def talk(messages, learn="all_turns", **row):
    chosen = Data(source="jsonl", path=("rows.jsonl",), sequence_length=64, learn=learn)
    return read_conversation({"messages": messages, **row}, chosen)


def said(*contents, system=None):
    roles = ("user", "assistant")
    first = [{"role": "system", "content": system}] if system else []
    return first + [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


QUESTIONS = said("1+1?", "<b>2", "2+2?", "<4>")
THOUGHTS = said("1+1?", "<think>\nhm\n</think>\n\n2")


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """What is learned of a conversation by a template, as text."""

    def of(template, messages, learn="all_turns"):
        made = HuggingFaceTokenizer(chat.directory(tmp_path_factory.mktemp("tokenizer"), template))
        try:
            samples = chat.drafts(ChatTemplate(made), talk(messages, learn))
        except CorruptData as error:
            return str(error)
        return [text[start:end] for text, parts in samples for start, end in parts]

    return of


@pytest.mark.parametrize(
    ("template", "last", "every"),
    [
        (chat.SIMPLE, "<4><end>", "<b>2<end>"),
        (chat.THOUGHTFUL, "<think>\n\n</think>\n\n<4><end>", "<think>\n\n</think>\n\n<b>2<end>"),
        (chat.THINKING, "\n</think>\n\n<4><end>", "\n</think>\n\n<b>2<end>"),
        (chat.CLOSED, "</think><4><end>", "</think><b>2<end>"),
        (chat.DISTILLED, "<4><end>", "<b>2<end>"),
        (chat.ALTERNATING, " <4><end>", " <b>2<end>"),
        (chat.RENAMED, "<4><over>\n", "<b>2<over>\n"),
        (chat.MARKED, "<4><end>", "<b>2<end>"),
        (chat.MARKED_WITH_NAME, "<assistant><4><end>", "<assistant><b>2<end>"),
        (chat.FORGETFUL, "<4><end>", "<b>2<end>"),
    ],
)
def test_the_last_turn_is_learned_of_every_template_or_each_one(learned, template, last, every):
    assert learned(template, QUESTIONS, "last_turn") == [last]
    assert learned(template, QUESTIONS) == [every, last]


PUBLISHED = importlib.util.find_spec("trl")


@pytest.mark.skipif(PUBLISHED is None, reason="trl is not installed, which carries the templates of models")
@pytest.mark.parametrize(
    "name",
    ["qwen3", "qwen3_5_think", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "glm4moe"],
)
def test_published_templates_learn_the_last_turn(learned, name):
    assert PUBLISHED is not None and PUBLISHED.submodule_search_locations is not None
    folder = Path(PUBLISHED.submodule_search_locations[0]) / "chat_templates"
    for path in (folder / f"{name}.jinja", folder / f"{name}_training.jinja"):
        if path.exists():
            found = "".join(learned(path.read_text(), QUESTIONS, "last_turn"))
            assert "<4>" in found and "2+2" not in found and "assistant" not in found


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (chat.THOUGHTFUL, ["<think>\nhm\n</think>\n\n2<end>"]),
        (chat.THINKING, ["hm\n</think>\n\n2<end>"]),
        (chat.ALTERNATING, [" <think>\nhm\n</think>\n\n2<end>"]),
    ],
)
@pytest.mark.parametrize("learn", ["all_turns", "last_turn"])
def test_thoughts_are_learned_where_the_template_writes_them(learned, template, expected, learn):
    assert learned(template, THOUGHTS, learn) == expected


@pytest.mark.parametrize(
    "template",
    [chat.DISTILLED, chat.MARKED.replace("m.content +", "m.content.split('</think>')[-1] +")],
    ids=["distilled", "marked"],
)
@pytest.mark.parametrize("learn", ["all_turns", "last_turn"])
def test_thoughts_that_a_template_leaves_out_are_told(learned, template, learn, messages):
    why = learned(template, THOUGHTS, learn)
    assert "leaves out" in why
    messages(why)
    assert learned(template, said("1?", "<think>\n1\n</think>", "2?", "2"), "last_turn") == ["2<end>"]


@pytest.mark.parametrize("template", [chat.ALTERNATING, chat.RENAMED])
@pytest.mark.parametrize("turns", [said("q", "a", system="Be short."), [*said("q"), *QUESTIONS]])
def test_what_a_template_raises_about_a_row_is_said_of_that_row(learned, template, turns):
    assert learned(template, turns).endswith(f"refuses the row: {chat.REFUSAL}")
    assert "refuses the row: " in learned("{{ 1 // 0 }}", QUESTIONS)


def test_rows_that_no_template_can_take(learned, messages):
    assert learned(chat.SIMPLE, said("q", "a")[1:]).startswith("message 0: ")
    assert "not characters" in learned(chat.MARKED, said("q", "a\ufdd0b"))
    other = chat.SIMPLE.replace("<assistant>", "<robot>")
    unwritten, misplaced = learned(chat.SPEECHLESS, QUESTIONS), learned(other, QUESTIONS)
    assert unwritten.endswith(": '<b>2'") and misplaced.startswith("message 1: ")
    messages(unwritten)
    messages(misplaced)


def test_marks_of_generation_are_read_as_transformers_reads_them(tmp_path):
    made = HuggingFaceTokenizer(chat.directory(tmp_path, chat.MARKED))
    messages = said("1+1?\n", "\n 2 ", "2+2?", "ünï", system="Be short.")
    theirs = made._tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )

    template = ChatTemplate(made)
    (document,) = template.encode(chat.drafts(template, talk(messages)))
    ids, ours = document.ids, np.asarray(document.loss_mask)
    assert ids.tolist() == theirs["input_ids"] and ours.tolist() == list(map(bool, theirs["assistant_masks"]))
    assert 0 < ours.sum() < len(ids)


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (chat.SIMPLE, {"<end>"}),
        (chat.SIMPLE.replace("<end>", "<end>\n"), {"<end>"}),  # as ChatML has it
        (chat.SIMPLE.replace("<end>", "<turn>\n"), {"<turn>"}),  # beside the tokenizer's own end
        (chat.SIMPLE.replace("<end>", ""), set()),  # GLM-4.5: the next role ends a turn
        (chat.SIMPLE.replace("<end>", "<end>."), set()),
    ],
)
def test_what_answers_end_with_is_seen_in_what_is_learned(tmp_path, template, ends):
    made = chat.directory(tmp_path / "tokenizer", template, pad="<turn>")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "\n".join(json.dumps({"messages": said("1?", "one", "2?", "two" * n)}) for n in range(1, 9))
    )
    keys = [f"data.tokenizer=hf:{made}", f"data.path={rows}", "data.source=jsonl", "data.template=chat"]
    keys += ["task=sft", "data.separator=null", "data.validation=0", "model.config.vocab_size=512"]
    corpus = prepare(load("demo", keys), tmp_path / "tokens")
    assert {corpus.tokenizer.decode([end]) for end in corpus.end_tokens} == ends
    asked = PromptBuilder.from_recipe(load("demo", keys))
    assert asked.end_tokens[0] == corpus.tokenizer.end_of_text
    assert {asked.tokenizer.decode([end]) for end in asked.end_tokens} == ends | {"<end>"}


def test_a_template_writes_the_date_that_it_is_told(tmp_path, messages):
    dated = "{% set day = strftime_now('%d %b %Y') %}<system>{{ day }}" + chat.SIMPLE
    made = HuggingFaceTokenizer(chat.directory(tmp_path, dated))
    with pytest.raises(UsageError, match=r"data\.date") as error:
        build_writer(Data(source="jsonl", path=("r",), sequence_length=64, template="chat"), made)
    assert "strftime_now" in str(error.value)
    messages(error.value)
    said = Data(source="jsonl", path=("r",), sequence_length=64, template="chat", date="2025-02-03")
    writes = build_writer(said, made)
    assert isinstance(writes, ChatTemplate)
    ((text, parts),) = chat.drafts(writes, talk(QUESTIONS))
    assert text.startswith("<system>03 Feb 2025<user>1+1?")
    assert [text[start:end] for start, end in parts] == ["<b>2<end>", "<4><end>"]


@pytest.mark.parametrize(("template", "why"), [(None, "no chat"), ("{% for %}", "line 1")])
def test_a_tokenizer_without_a_template_that_can_be_read_is_a_usage_error(learned, template, why):
    with pytest.raises(UsageError, match=rf"data\.template: .* {why}"):
        learned(template, QUESTIONS)


@pytest.mark.parametrize("begins", ["<end> $A", "$A <end>", "$A"])
def test_what_a_base_model_goes_on_with_begins_as_its_tokenizer_has_it(tmp_path, begins):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    made = transformers.AutoTokenizer.from_pretrained(chat.directory(tmp_path / "made", None))
    processing = tokenizers.processors.TemplateProcessing(
        single=begins, special_tokens=[("<end>", made.eos_token_id)]
    )
    made.backend_tokenizer.post_processor = processing
    made.save_pretrained(tmp_path / "of base")
    given = PromptBuilder.from_directory(tmp_path / "of base").build_prompt("abc", {}).ids
    whole = made("abc")["input_ids"]
    assert list(given) == [id for at, id in enumerate(whole) if id != made.eos_token_id or at == 0]
