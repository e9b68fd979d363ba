"""The tokens whose logits are kept, and those of a chunk, by the words, tokens and ranks of a recipe."""

import pytest

from bundle.recipe.loss_chunks import choose_loss_chunks, compute_local_vocab_size
from tests.planning.jobs import QWEN3, job

WORDS = 151936  # of which 3,533 tokens have 2**29 logits, 14,134 have 2**31
PACKED = {"packed": True}
ROWS = {
    "source": "jsonl",
    "path": ["rows.jsonl"],
    "tokenizer": "hf:none",
    "template": "chat",
    "packed": False,
}


def of(length, words=WORDS, *, data=PACKED, rows=1, tp=1, cp=1, model_changes=None, **sections):
    return job(
        QWEN3,
        model={
            "config": QWEN3 | {"vocab_size": words, "max_position_embeddings": length},
            **(model_changes or {}),
        },
        data=data | {"sequence_length": length},
        train={"micro_batch_size": rows, "global_batch_size": rows},
        parallel={"tp": tp, "cp": cp, "sequence_parallel": tp > 1},
        **sections,
    )


@pytest.mark.parametrize(
    ("recipe", "chunks"),
    [
        (of(883), None),  # one token too few
        (of(884), (884, 3456)),  # all are kept
        (of(14081), (14080, 3456)),  # multiples of 128
        (of(32768, WORDS - 1), (14080, 3456)),  # padded to as many
        (of(4096, 32768), (4096, 16384)),
        (of(65537, 32768), (65536, 16384)),
        (of(30000, tp=2), (28160, 7040)),
        (of(1766, tp=2), None),
        (of(32768, cp=2), (14080, 3456)),
        (of(1764, cp=2), None),
        (of(4096, data=ROWS, rows=4, task="sft"), (14080, 3456)),
        (of(4096, data=ROWS, rows=2, task="dpo"), (14080, 3456)),  # a pair has two rows
        (of(4096, data=ROWS, rows=2, task="sft"), (8192, 3456)),
        (of(128, 1 << 25), (64, 16)),  # fewer than 128 tokens are not rounded
    ],
)
def test_many_logits_are_kept_or_computed_in_chunks(recipe, chunks):
    assert choose_loss_chunks(recipe) == chunks
    if chunks is not None:
        logits = compute_local_vocab_size(recipe)
        assert chunks[0] * logits <= 2**31 and chunks[1] * logits <= 2**29


def test_losses_of_several_depths_share_what_is_kept():
    both = choose_loss_chunks(of(32768, model_changes={"mtp": {"layers": 1}}))
    assert both == (7040, 3456)
