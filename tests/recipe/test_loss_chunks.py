"""The tokens of a chunk of the loss, by the words, the tokens and the ranks of a recipe."""

import pytest

from bundle.recipe.loss_chunks import choose_loss_chunk, count_local_logits
from tests.planning.jobs import QWEN3, job

WORDS = 151936  # of which 1,766 tokens have 2**28 logits
PACKED = {"packed": True}
ROWS = {
    "source": "jsonl",
    "path": ["rows.jsonl"],
    "tokenizer": "hf:none",
    "template": "chat",
    "packed": False,
}


def of(length, words=WORDS, *, data=PACKED, rows=1, tp=1, cp=1, **sections):
    return job(
        QWEN3,
        model={"config": QWEN3 | {"vocab_size": words, "max_position_embeddings": length}},
        data=data | {"sequence_length": length},
        train={"micro_batch_size": rows, "global_batch_size": rows},
        parallel={"tp": tp, "cp": cp, "sequence_parallel": tp > 1},
        **sections,
    )


@pytest.mark.parametrize(
    ("recipe", "chunk"),
    [
        (of(3532), None),  # no more than two chunks
        (of(3533), 1766),
        (of(8192), 1766),
        (of(8192, WORDS - 1), 1766),  # padded to as many
        (of(8192, 32768), None),
        (of(16385, 32768), 8192),
        (of(7068, tp=2), 3533),
        (of(7066, tp=2), None),
        (of(8192, cp=2), 1766),
        (of(7064, cp=2), None),
        (of(1024, data=ROWS, rows=4, task="sft"), 1766),
        (of(1024, data=ROWS, rows=2, task="dpo"), 1766),  # a pair has two rows
        (of(1024, data=ROWS, rows=2, task="sft"), None),
    ],
)
def test_more_than_two_chunks_are_taken_one_by_one(recipe, chunk):
    assert choose_loss_chunk(recipe) == chunk
    assert chunk is None or chunk * count_local_logits(recipe) <= 2**28
