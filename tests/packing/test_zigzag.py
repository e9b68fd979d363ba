"""The shards of unpacked tensors, which must be those of a packing of equal lengths, and Megatron's."""

import importlib.util
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bundle.errors import JobFailed
from bundle.packing.packing import Packing, shard
from bundle.recipe.alignment import Alignment
from tests.packing.strategies import SIZES


@given(SIZES, st.integers(1, 3), st.integers(1, 4))
def test_every_row_is_on_one_rank(cp, rows, chunk):
    x = torch.arange(rows * 2 * cp * chunk).view(rows, -1)
    shards = [shard(x, cp, rank) for rank in range(cp)]
    assert torch.equal(torch.cat(shards, 1).sort(1).values, x)


@given(SIZES, st.integers(1, 3), st.integers(1, 4))
def test_an_unpacked_batch_is_a_packing_of_equal_lengths(cp, rows, chunk):
    s = 2 * cp * chunk
    x = torch.arange(rows * s).view(rows, s)
    for rank in range(cp):
        packing = Packing.from_lengths([s] * rows, Alignment("bshd", cp=cp), rank=rank)
        assert torch.equal(packing.pack_concatenated_tokens(x.flatten()), shard(x, cp, rank))


def test_rows_that_do_not_divide_are_refused(messages):
    with pytest.raises(JobFailed, match="multiple of 4") as error:
        shard(torch.zeros(1, 6), 2, 0)
    messages(error.value)


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
def test_the_order_is_megatrons():
    # In a process of its own: importing megatron here would change what other tests find.
    command = [sys.executable, "-m", "tests.packing.megatron_order"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
