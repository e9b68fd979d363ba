"""The tokens of a chunk of the loss, by the words, the tokens and the ranks of a recipe."""

import pytest

from bundle.recipe.loss_chunks import choose_loss_chunk, compute_local_vocab_size
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
        (of(14134), None),  # one token too few
        (of(14135), 1766),
        (of(16384, WORDS - 1), 1766),  # padded to as many
        (of(32768, 32768), None),
        (of(65536, 32768), 8192),
        (of(28270, tp=2), 3533),
        (of(28266, tp=2), None),
        (of(32768, cp=2), 1766),
        (of(28264, cp=2), None),
        (of(4096, data=ROWS, rows=4, task="sft"), 1766),
        (of(4096, data=ROWS, rows=2, task="dpo"), 1766),  # a pair has two rows
        (of(4096, data=ROWS, rows=2, task="sft"), None),
    ],
)
def test_many_logits_are_computed_in_chunks(recipe, chunk):
    assert choose_loss_chunk(recipe) == chunk
    assert chunk is None or chunk * compute_local_vocab_size(recipe) <= 2**28
