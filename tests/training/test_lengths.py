"""Which lengths of sequences a layout takes: what the rules let through trains, as one rank trains it."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle.errors import UsageError
from bundle.recipe import load
from tests.command import finish, start_training

HEADS = ("model.config.num_attention_heads=12", "model.config.num_key_value_heads=12")
SIZE = st.sampled_from((1, 2, 3, 4, 6))


@given(tp=SIZE, cp=st.integers(1, 6), packed=st.booleans(), length=st.integers(8, 400))
def test_a_length_is_taken_exactly_where_every_rank_gets_whole_and_as_many_rows(tp, cp, packed, length):
    overrides = (*HEADS, f"parallel.tp={tp}", "parallel.sequence_parallel=null", f"parallel.cp={cp}")
    shape = (
        f"data.sequence_length={length}",
        f"data.packed={str(packed).lower()}",
        "train.micro_batch_size=1",
    )
    pieces = 2 * cp if cp > 1 else 1  # zigzag: two of one size for each rank
    fits = length % pieces == 0 and length // cp % tp == 0
    try:
        taken = bool(load("qwen3-tp2-sp", (*overrides, *shape)))
    except UsageError as error:
        assert all("data.sequence_length: " in violation for violation in error.violations)
        taken = False
    assert taken == fits


@pytest.mark.world
@pytest.mark.slow
def test_a_length_that_only_just_fits_trains_as_on_one_rank(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    alone = losses(tmp_path / "alone", "parallel.tp=1", "parallel.sequence_parallel=null")
    # 60 rows: 30 for a context-parallel rank in two pieces, 15 for a sequence-parallel one. No multiple of 8.
    assert losses(tmp_path / "four", "parallel.tp=2", "parallel.cp=2") == pytest.approx(alone, rel=1e-5)


def losses(directory: Path, *layout: str) -> list[float]:
    text = directory.with_suffix(".txt")
    text.write_text("".join(f"line {n} of a text that nobody has read before\n" for n in range(400)))
    job = (
        *layout, "train.steps=2", "train.micro_batch_size=2", "train.global_batch_size=4",
        "optimizer.warmup_steps=0", "model.config.num_key_value_heads=4", "checkpoint.interval=1000",
        "data.sequence_length=60", f"data.path=[{text}]",
    )  # fmt: skip
    finish(start_training("qwen3-tp2-sp", directory, job))
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines for name in ("train/loss", "validation/loss") if name in line]
