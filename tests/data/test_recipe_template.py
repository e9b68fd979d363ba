"""A recipe's own chat template writes the rows, and goes where the tokenizer goes."""

import json
from pathlib import Path

import numpy as np
import pytest

from bundle.data.chat import ChatTemplate, build_writer
from bundle.data.conversations import read_conversation
from bundle.data.corpus import prepare
from bundle.data.prompts import PromptBuilder
from bundle.data.samples import read_loss_mask
from bundle.data.tokenizers import HuggingFaceTokenizer
from bundle.errors import UsageError
from bundle.pretrained import writing
from bundle.pretrained.writing import PublishedModel
from bundle.recipe import load
from tests.data import chat

TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "ünï 4"},
]
CHATML = (
    "<|im_start|>system\nBe short.<|im_end|>\n"
    "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\nünï 4<|im_end|>\n"
)
ASKED = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def job(tmp_path):
    """A recipe of rows with a template, and a tokenizer that has another one, or none."""

    def build(template, own=chat.SIMPLE):
        made = chat.directory(tmp_path / "tokenizer", own)
        (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
        keys = [f"data.tokenizer=hf:{made}", f"data.path={tmp_path / 'rows.jsonl'}", "data.source=jsonl"]
        keys += ["task=sft", "data.separator=null", "data.validation=0", "model.config.vocab_size=512"]
        return load("demo", [*keys, f"data.template={template}", "data.sequence_length=256"])

    return build


def written(recipe):
    """The text and the learned texts of the row."""
    template = build_writer(
        recipe.data, HuggingFaceTokenizer(Path(recipe.data.tokenizer.removeprefix("hf:")))
    )
    assert isinstance(template, ChatTemplate)
    ((text, parts),) = chat.drafts(template, read_conversation({"messages": TALK}, recipe.data))
    return text, [text[begin:end] for begin, end in parts]


@pytest.mark.parametrize("own", [chat.SIMPLE, None])
def test_chatml_writes_and_learns_what_transformers_does_with_it(job, own):
    recipe = job("chatml", own)
    assert written(recipe) == (CHATML, ["2<|im_end|>", "ünï 4<|im_end|>"])
    made = HuggingFaceTokenizer(Path(recipe.data.tokenizer.removeprefix("hf:")))
    theirs = made._tokenizer.apply_chat_template(
        TALK,
        chat_template=recipe.data.custom_template_text,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert made.decode(theirs["input_ids"]) == CHATML
    (store,) = prepare(recipe, Path(recipe.data.path[0]).parent / "tokens").stores
    places = np.arange(store.document_starts[0], store.document_starts[0] + store.lengths[0])
    assert store.ids[places].tolist() == theirs["input_ids"]
    assert read_loss_mask(store, places).tolist() == list(map(bool, theirs["assistant_masks"]))


def test_generate_asks_by_the_template_that_was_trained(job):
    asked = PromptBuilder.from_recipe(job("chatml")).build_prompt("1+1?", {})
    tokenizer = PromptBuilder.from_recipe(job("chatml")).tokenizer
    assert tokenizer.decode(asked.ids) == ASKED


def test_a_template_that_cannot_be_read_is_refused_with_its_line(job, tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages }}\n\n{% for %}")
    with pytest.raises(UsageError) as caught:
        written(job(path))
    assert "data.template" in str(caught.value) and "line 3" in str(caught.value)


@pytest.mark.parametrize("key", [True, False])
def test_what_is_published_has_the_template_that_was_trained(job, tmp_path, key):
    recipe, out = job("chatml"), tmp_path / "out"
    made = Path(recipe.data.tokenizer.removeprefix("hf:"))
    if key:  # as releases of transformers 4 wrote it
        settings = json.loads((made / "tokenizer_config.json").read_text())
        (made / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": chat.SIMPLE}))
        (made / "chat_template.jinja").unlink()
        (made / "chat_template.json").write_text(json.dumps({"chat_template": chat.SIMPLE}))
    out.mkdir()
    (out / "config.json").write_text("{}")
    writing.copy_extra_files(PublishedModel.from_recipe(recipe), out)
    published = HuggingFaceTokenizer(out)
    theirs = published._tokenizer.apply_chat_template(TALK, tokenize=False)
    assert theirs == CHATML
    assert json.loads((out / "tokenizer_config.json").read_text())["chat_template"] == recipe.data.template
    assert not key or json.loads((out / "chat_template.json").read_text()) == {
        "chat_template": recipe.data.template
    }
    assert published.read_chat_template() == recipe.data.template
