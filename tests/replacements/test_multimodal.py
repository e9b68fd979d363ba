"""Rotary rows of packs with positions in several dimensions, taken without a look at the device."""

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.usefixtures("megatron")

LENGTHS = (8, 16, 4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_takes_the_rows_of_its_chunks_and_reads_nothing_back(monkeypatch, ranks):
    from bundle.replacements.attention import apply_packed_mrope

    boundaries = torch.tensor([0, 8, 24, 28], dtype=torch.int32)
    table = torch.randn(28, 1, 1, 6)
    given = []

    def original(t, freqs, config, cu_seqlens):
        assert cu_seqlens is None
        given.append(freqs[:, 0, 0])
        return t

    for name in ("tolist", "item", "__int__", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("read back from the device"))
    config, apply = SimpleNamespace(mrope_section=[1, 1, 1]), apply_packed_mrope(original)
    for rank in range(ranks):
        group = SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)
        monkeypatch.setattr(
            "megatron.core.parallel_state.get_context_parallel_group", lambda group=group: group
        )
        apply(torch.randn(28 // ranks, 2, 6), table, config, cu_seqlens=boundaries)
    sequences = table[:, 0, 0].split(LENGTHS)
    for rank, seen in enumerate(given):
        chunks = [sequence.chunk(2 * ranks) for sequence in sequences]
        own = [part for each in chunks for part in (each[rank], each[2 * ranks - 1 - rank])]
        assert torch.equal(seen, torch.cat(own))
