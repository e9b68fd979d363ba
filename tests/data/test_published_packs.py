"""Templates of the shapes of published models, cut and packed: every sequence of a pack and what it learns.

The oracles are those of test_published_shapes; a token is a byte here, so that a cut is a slice of bytes.
"""

import itertools
import json

import numpy as np
import pytest

from bundle.data import prepare
from bundle.data.tokenizers import HuggingFaceTokenizer
from bundle.recipe import load
from tests.data import chat
from tests.data.published import SHAPES
from tests.data.test_published_shapes import TODAY, prompt, talk
from tests.data.test_tools import TOOLS

COMBINATIONS = list(itertools.product((1, 3), (False, True), (False, True), (None, "reasoning_content")))
# What is published of them: a template of each has to take rows of several turns.
FAMILIES = (
    *("qwen2.5", "qwen3", "qwen3-instruct-2507", "llama-3.1", "mistral", "gemma-3", "deepseek-v3"),
    *("deepseek-r1", "glm-4.5", "kimi-k2", "gpt-oss", "phi-4", "mimo"),
)


def rows_of(shape):
    """The conversations that a template takes, with their tools."""
    for turns, tools, system, thoughts in COMBINATIONS:
        messages = talk(turns, tools, system, thoughts)
        is_written = all(shape.says(m) is not None for m in messages if m["role"] == "assistant")
        if is_written and not (tools and not shape.tools) and not (system and shape.refuses_system):
            yield messages, TOOLS if tools else None


def sequences_of(shape, made, messages, tools):
    """(bytes, which of them are learned) of each sequence of a row: turns that stay as they are share one."""
    found: list[tuple[bytes, list[bool]]] = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before, said = (
                text.encode() for text in (prompt(shape, made, messages[:index], tools), shape.says(message))
            )
            mask = [False] * len(before)
            if found and before.startswith(found[-1][0]):
                shared = found.pop()[1]
                mask[: len(shared)] = shared
            found.append((before + said, mask + [True] * len(said)))
    return found


def test_the_families_that_are_promised_are_there():
    assert set(FAMILIES) <= set(SHAPES)
    for name in FAMILIES:
        assert max(len(messages) for messages, _ in rows_of(SHAPES[name])) >= 6, name


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", FAMILIES)
def test_packs_of_cut_rows_learn_what_the_whole_rows_do(tmp_path, name, side):
    shape = SHAPES[name]
    directory = chat.directory(tmp_path / "tokenizer", shape.template)
    made = HuggingFaceTokenizer(directory)
    rows = list(rows_of(shape))
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"messages": messages, "tools": tools}) for messages, tools in rows))
    whole = [each for row in rows for each in sequences_of(shape, made, *row)]
    longest = sorted(len(text) for text, _ in whole)[len(whole) // 2] - 3
    kept = slice(longest) if side == "right" else slice(-longest, None)
    expected = [(text[kept], [*mask[kept][1:], False]) for text, mask in whole if any(mask[kept][1:])]

    keys = [f"data.tokenizer=hf:{directory}", f"data.path={path}", "data.source=jsonl", "data.template=chat"]
    keys += ["task=sft", "data.separator=null", "data.validation=0", "model.config.vocab_size=512"]
    keys += ["data.packed=true", "train.micro_batch_size=1", f"data.truncation={side}"]
    keys += [f"data.sequence_length={4 * longest}", f"model.config.max_position_embeddings={longest}"]
    keys += [f"data.date={TODAY}"] if "strftime_now" in shape.template else []
    corpus = prepare(load("demo", keys), tmp_path / "tokens")

    found = []
    for number in range(len(corpus.training)):
        pack = corpus.training.build_batch(np.array([number]))
        assert pack.lengths is not None
        for begin, end in itertools.pairwise(itertools.accumulate(pack.lengths, initial=0)):
            text = made.decode(pack.ids[0, begin:end].tolist()).encode()
            found.append((text, pack.loss_mask[0, begin:end].bool().tolist()))
    assert max(len(text) for text, _ in found) == longest and len(corpus.training) < len(found)
    assert sorted(found) == sorted(expected)
