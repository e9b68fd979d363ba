"""GSM8K through chat templates: what is learned of every row, token by token, and a loss that falls.

What is learned is read here from the bytes that tokens stand for, with no place that a tokenizer tells.
"""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from bundle.data import prepare
from bundle.recipe import load
from tests.command import finish, start_training

ROOT = Path(__file__).parents[2]
GSM8K = Path(os.environ.get("BUNDLE_GSM8K", ROOT.parent / "shared" / "data" / "gsm8k"))
pytestmark = pytest.mark.skipif(
    not GSM8K.is_dir(), reason=f"GSM8K is not in {GSM8K}: set BUNDLE_GSM8K to its directory"
)
FIELDS = ("task=sft", "data.source=jsonl", "data.fields={prompt: question, response: answer}")
WORDS = 2000  # of the vocabulary
END = "<|endoftext|>"
# ChatML with a system message of its own, as Qwen2.5 has it, and headings as Llama 3 has them; of each what
# the assistant says.
CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou solve problems.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADINGS = (
    "{{ bos_token }}{% for m in messages %}"
    "<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|over|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
STYLES = {
    "ChatML": (CHATML, ["<|im_start|>", "<|im_end|>"], rb"<\|im_start\|>assistant\n(.*?<\|im_end\|>\n)"),
    "headings": (
        HEADINGS,
        ["<|start|>", "<|end|>", "<|over|>"],
        rb"<\|start\|>assistant<\|end\|>\n\n(.*?<\|over\|>)",
    ),
}

RECIPE = """
name: gsm8k
backend: cpu
model:
  config: {model_type: qwen2, vocab_size: 2048, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 1,
           num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 512}
  dtype: fp32
data: {template: chat, packed: true, sequence_length: 512}
train: {steps: 40, micro_batch_size: 1, global_batch_size: 2, log_interval: 1, eval_interval: 0}
optimizer: {lr: 1.0e-2, warmup_steps: 0}
checkpoint: {interval: 0}
metrics: {tensorboard: false}
"""


def rows(name):
    return [json.loads(line) for line in (GSM8K / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """A directory for each style: byte-level BPE learned from some of the rows, and the chat template."""
    transformers, library = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    directory = tmp_path_factory.mktemp("tokenizers")
    some = [f"{row['question']}\n{row['answer']}" for row in rows("test")]
    for style, (template, special, _) in STYLES.items():
        raw = library.Tokenizer(library.models.BPE())
        raw.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = library.decoders.ByteLevel()
        alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        raw.train_from_iterator(
            some,
            library.trainers.BpeTrainer(
                vocab_size=WORDS,
                special_tokens=[END, *special],
                initial_alphabet=alphabet,
                show_progress=False,
            ),
        )
        made = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END, bos_token=END)
        made.chat_template = template
        made.save_pretrained(directory / style)
    return directory


def bytes_of_tokens(tokenizer):
    """What each token stands for, by its id."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that GPT-2 writes as they are
    letters = {chr(byte): byte for byte in shown}
    hidden = [byte for byte in range(256) if byte not in shown]
    letters |= {chr(256 + number): byte for number, byte in enumerate(hidden)}
    special = set(tokenizer.all_special_tokens) | set(tokenizer.get_added_vocab())
    vocabulary = tokenizer.get_vocab()
    return {
        number: token.encode() if token in special else bytes(letters[letter] for letter in token)
        for token, number in vocabulary.items()
    }


def reading(ids, known, answer):
    """The text of tokens, and of each whether it begins in what the assistant says."""
    parts = [known[number] for number in ids]
    text = b"".join(parts)
    begins = np.cumsum([0, *map(len, parts[:-1])])
    learned = np.zeros(len(ids), bool)
    for found in re.finditer(answer, text, re.DOTALL):
        learned |= (begins >= found.start(1)) & (begins < found.end(1))
    return text.decode(), learned


@pytest.mark.parametrize(
    ("style", "name", "packed"),
    [("ChatML", "train", True), ("headings", "test", False)],
)
def test_of_every_row_exactly_the_assistants_tokens_are_learned(tokenizers, tmp_path, style, name, packed):
    from transformers import AutoTokenizer

    given, (_, _, answer) = rows(name), STYLES[style]
    how = ["data.sequence_length=2048", "model.config.max_position_embeddings=2048", "data.validation=0"]
    how += [
        f"data.path={GSM8K / name}.jsonl",
        f"data.tokenizer=hf:{tokenizers / style}",
        "data.template=chat",
    ]
    how += [f"data.packed={str(packed).lower()}", "train.micro_batch_size=1", "model.config.vocab_size=2048"]
    corpus = prepare(load("demo", [*FIELDS, *how]), tmp_path)
    assert corpus.left_out.skipped_rows == ()
    tokenizer = AutoTokenizer.from_pretrained(str(tokenizers / style))
    talks = [
        [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        for row in given
    ]
    texts = tokenizer.apply_chat_template(talks, tokenize=False)
    wanted = tokenizer(texts, add_special_tokens=False)["input_ids"]
    known, seen = bytes_of_tokens(tokenizer), []
    for number in range(len(corpus.training)):
        batch = corpus.training.build_batch(np.asarray([number]))
        lengths = list(batch.lengths or batch.ids.shape[1:])
        columns = (of[0].split(lengths) for of in (batch.ids, batch.labels, batch.loss_mask))
        for document, ids, labels, mask in zip(batch.documents.tolist(), *columns, strict=True):
            whole, count = wanted[document], len(wanted[document])
            text, learned = reading(whole, known, answer)
            assert text == texts[document] and ids[:count].tolist() == whole
            assert labels[: count - 1].tolist() == whole[1:]
            assert mask[: count - 1].bool().tolist() == learned[1:].tolist() and not mask[count - 1 :].any()
            shown = b"".join(known[token] for token, of in zip(whole, learned, strict=True) if of).decode()
            assert shown.startswith(given[document]["answer"].strip())
            seen.append(document)
    assert sorted(seen) == list(range(len(given)))


@pytest.mark.world
def test_a_training_learns(tokenizers, tmp_path):
    pytest.importorskip("megatron.core")
    given, recipe = tmp_path / "rows.jsonl", tmp_path / "recipe.yaml"
    given.write_text("\n".join(map(json.dumps, rows("train")[:100])))
    recipe.write_text(RECIPE)
    how = [f"data.path={given}", f"data.tokenizer=hf:{tokenizers / 'ChatML'}"]
    finish(start_training(str(recipe), tmp_path / "run", [*FIELDS, *how]))
    metrics = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [line["train/loss"] for line in metrics if "train/loss" in line]
    assert len(losses) == 40 and losses[-1] < 0.75 * losses[0]
