"""The roll to the next token of a pack on one rank, against megatron's own loop over the sequences."""

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("megatron")

LENGTHS, PADDED = (5, 1, 9, 3), (8, 4, 12, 4)


def boundaries(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@pytest.fixture
def original() -> Any:
    module = pytest.importorskip("megatron.core.transformer.multi_token_prediction")
    if not hasattr(module, "_roll_tensor_packed_seq"):
        pytest.skip("older than 0.16: it rolls no packs")
    return module._roll_tensor_packed_seq


@pytest.mark.parametrize("rows", [1, 2])
def test_without_padding_it_is_megatrons_own(original, rows):
    from bundle.replacements.mtp import roll_packed_by_gather

    tensor = torch.rand(rows, sum(LENGTHS))
    params = SimpleNamespace(cu_seqlens_q=boundaries(LENGTHS), cu_seqlens_q_padded=None)
    seen, count = roll_packed_by_gather(original)(tensor, -1, -1, params)
    wanted, wanted_count = original(tensor, -1, -1, params)
    assert torch.equal(seen, wanted) and count == pytest.approx(float(wanted_count))


def test_with_padding_sequences_are_where_the_padding_puts_them(original):
    """megatron's own, told where they lie; it looks for them where they would lie without."""
    from bundle.replacements.mtp import roll_packed_by_gather

    tensor = torch.rand(1, sum(PADDED))
    params = SimpleNamespace(cu_seqlens_q=boundaries(LENGTHS), cu_seqlens_q_padded=boundaries(PADDED))
    seen, _ = roll_packed_by_gather(original)(tensor, -1, -1, params)
    laid_out = SimpleNamespace(cu_seqlens_q=boundaries(PADDED))
    assert torch.equal(seen, original(tensor, -1, -1, laid_out)[0])
    assert not torch.equal(seen, original(tensor, -1, -1, params)[0])


@pytest.mark.parametrize(("shifts", "dims"), [(-2, -1), (-1, 0)])
def test_what_megatron_refuses_it_still_refuses(original, shifts, dims):
    from bundle.replacements.mtp import roll_packed_by_gather

    params = SimpleNamespace(cu_seqlens_q=boundaries(LENGTHS), cu_seqlens_q_padded=None)
    with pytest.raises(AssertionError, match="Packed sequence"):
        roll_packed_by_gather(original)(torch.rand(2, sum(LENGTHS)), shifts, dims, params)


@pytest.mark.parametrize(
    ("given", "runs"),
    [
        ({}, False),
        ({"labels": 1}, True),
        ({"inference_context": object()}, True),
        ({"mtp_kwargs": {"mtp_labels": 1}}, True),
        ({"mtp_kwargs": {}}, False),
    ],
    ids=["nothing", "labels", "inference", "labels of a fork", "no labels of a fork"],
)
def test_prediction_layers_run_where_somebody_gives_them_labels(given, runs):
    from bundle.replacements.mtp import disable_mtp_without_labels

    def forward(self, ids, labels=None, inference_context=None, mtp_kwargs=None):
        return self.mtp_process

    model = SimpleNamespace(mtp_process=True, config=SimpleNamespace(mtp_num_layers=1))
    assert disable_mtp_without_labels(forward)(model, 0, **given) is runs
    assert model.mtp_process and model.config.mtp_num_layers == 1
