"""What reaches npu_fusion_attention for a mask and a layout, and what never does."""

import pytest
import torch

from bundle.backends.ascend.attention import AttentionCallShape, build_causal_mask, build_mask_arguments
from bundle.errors import JobFailed

CPU = torch.device("cpu")


def rows(s: int = 6, batch: int = 2) -> AttentionCallShape:
    return AttentionCallShape(queries=s, keys=s, device=CPU, batch=batch)


def pack(*ends: int, keys: tuple[int, ...] | None = None, total: int | None = None) -> AttentionCallShape:
    keys = keys or ends
    return AttentionCallShape(total or ends[-1], keys[-1], CPU, boundaries=(ends, keys))


def test_no_mask_is_one_compressed_mask_of_every_length_or_none_at_all():
    short, long = (build_mask_arguments(None, rows(s), causal=True) for s in (6, 5000))
    assert short == long and short.sparse_mode == 3
    assert short.atten_mask is long.atten_mask is build_causal_mask(CPU)
    assert torch.equal(build_causal_mask(CPU), torch.triu(torch.ones(2048, 2048, dtype=torch.bool), 1))
    free = build_mask_arguments(None, rows(), causal=False)
    assert (free.atten_mask, free.sparse_mode) == (None, 0)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_square_mask_is_used_in_full(batch):
    hidden = torch.rand(batch, 1, 6, 6) < 0.5
    free = build_mask_arguments(hidden, rows(), causal=False)
    assert free.atten_mask is hidden and free.sparse_mode == 1 and free.inner_precise == 2
    causal = build_mask_arguments(hidden, rows(), causal=True)
    assert causal.atten_mask is not None and causal.sparse_mode == 1
    assert torch.equal(causal.atten_mask, hidden | torch.ones(6, 6, dtype=torch.bool).triu(1))


def test_the_last_queries_of_longer_keys():
    hidden = torch.zeros(1, 1, 2, 5, dtype=torch.bool)
    inputs = build_mask_arguments(hidden, AttentionCallShape(2, 5, CPU), causal=True)
    assert inputs.atten_mask is not None
    assert inputs.atten_mask[0, 0].tolist() == [[False] * 4 + [True], [False] * 5]


def test_packed_input_goes_by_ends_without_the_first_zero():
    causal = build_mask_arguments(None, pack(0, 5, 5, 16), causal=True)
    assert causal.actual_seq_qlen == causal.actual_seq_kvlen == (5, 5, 16)
    assert causal.sparse_mode == 3 and causal.atten_mask is build_causal_mask(CPU)
    free = build_mask_arguments(None, pack(0, 2, 4, keys=(0, 3, 9)), causal=False)
    assert (free.atten_mask, free.actual_seq_qlen, free.actual_seq_kvlen) == (None, (2, 4), (3, 9))


def test_every_argument_that_says_what_is_seen_is_given_in_every_call():
    names = {"atten_mask", "sparse_mode", "pre_tockens", "next_tockens", "inner_precise"}
    names |= {"actual_seq_qlen", "actual_seq_kvlen"}
    hidden = torch.zeros(2, 1, 6, 6, dtype=torch.bool)
    for mask, of in ((None, rows()), (hidden, rows()), (None, pack(0, 5, 16))):
        for causal in (True, False):
            assert set(build_mask_arguments(mask, of, causal=causal).to_keywords()) == names


@pytest.mark.parametrize("batch", [2, 6])  # 6 by 6: the operator would take it for [queries, keys]
def test_a_mask_of_valid_tokens_is_refused(batch, messages):
    valid = torch.ones(batch, 6, dtype=torch.bool)
    with pytest.raises(JobFailed, match=rf"bool \[{batch}, 6\]") as error:
        build_mask_arguments(valid, rows(batch=batch), causal=True)
    messages(error.value)
    with pytest.raises(JobFailed, match="boundaries") as error:
        build_mask_arguments(valid, pack(0, 5, 16), causal=True)
    messages(error.value)


@pytest.mark.parametrize(
    "mask",
    [
        torch.zeros(2, 1, 1, 6, dtype=torch.bool),
        torch.zeros(3, 1, 6, 6, dtype=torch.bool),
        torch.zeros(2, 1, 6, 7, dtype=torch.bool),
        torch.zeros(2, 6, 6, dtype=torch.bool),
        torch.zeros(2, 1, 6, 6),
    ],
)
def test_other_masks_are_refused(mask, messages):
    with pytest.raises(JobFailed, match=r"\[2 or 1, 1, 6, 6\]") as error:
        build_mask_arguments(mask, rows(), causal=False)
    messages(error.value)


@pytest.mark.parametrize(
    ("of", "value"),
    [
        (pack(5, 11), "[5, 11]"),
        (pack(0, 5, 3), "[0, 5, 3]"),
        (pack(0), "[0]"),
        (pack(0, 5, 11, total=16), "row 16"),
        (pack(0, 5, 11, keys=(0, 11)), "1 of keys"),
        (pack(0, 5, 11, keys=(0, 4, 11)), "4 keys"),
        (pack(*range(2050)), "2048"),
        (AttentionCallShape(5, 4, CPU), "4 keys"),
    ],
)
def test_rows_that_the_operator_would_compute_wrongly_are_refused(of, value, messages):
    with pytest.raises(JobFailed) as error:
        build_mask_arguments(None, of, causal=True)
    assert value in str(error.value)
    messages(error.value)


def test_all_mistakes_come_at_once():
    with pytest.raises(JobFailed) as error:
        build_mask_arguments(torch.ones(2, 8), pack(0, 5, 11, keys=(0, 12), total=16), causal=True)
    assert len(error.value.violations) == 3
