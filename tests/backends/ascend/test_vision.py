"""A vision tower's attention on ascend, over the emulated operator: all windows, or images, in one call."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

from bundle.backends.ascend import attention, operators, vision
from bundle.errors import JobFailed
from tests.backends.ascend.contract import ContractViolation
from tests.backends.cpu import reference
from tests.backends.cpu.core import agree, inputs
from tests.vision import packed

pytestmark = pytest.mark.usefixtures("megatron", "emulated")


@pytest.fixture
def calls(monkeypatch):
    """What the operator is told in each call."""
    seen, found = [], operators.find_operator

    def noted(name):
        def call(*given, **options):
            seen.append(options)
            return found(name)(*given, **options)

        return call

    monkeypatch.setattr(attention, "find_operator", noted)
    return seen


@settings(max_examples=25)
@given(st.lists(st.integers(0, 19), min_size=1, max_size=6).filter(sum), st.sampled_from((8, 80)))
def test_every_row_sees_its_own_sequence_and_all_of_it(lengths, wide):
    q, k, v = inputs(sum(lengths), None, heads=2, groups=2, qk=wide, v=wide, dtype=torch.float32)
    out = vision.attend_packed(q, k, v, (0, *accumulate(lengths)), scale=0.3)
    want = reference.packed(q.double(), k.double(), v.double(), lengths, lengths, scale=0.3, causal=False)
    agree(out, want, (q, k, v), tolerance=1e-4)


def test_more_sequences_than_a_call_takes_are_several_calls(calls):
    lengths = [1, 2] * 1024 + [3]
    q, k, v = inputs(sum(lengths), None, heads=1, groups=1, qk=4, v=4, dtype=torch.float32, seed=1)
    out = vision.attend_packed(q, k, v, (0, *accumulate(lengths)), scale=1.0)
    assert [len(call["actual_seq_qlen"]) for call in calls] == [2048, 1]
    torch.testing.assert_close(out[-3:], vision.attend_packed(q[-3:], k[-3:], v[-3:], (0, 3), scale=1.0))
    first = vision.attend_packed(q[:3], k[:3], v[:3], (0, 1, 3), scale=1.0)
    torch.testing.assert_close(out[:3], first)


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ((0, 4, 2, 8), "decrease from 4 to 2"),
        ((0, 4), "do not end at row 8"),
        ((0, 4, 9), "do not end at row 8"),
        ((1, 8), "begin with 1, not with 0"),
    ],
)
def test_boundaries_that_the_operator_would_not_compute_are_refused(boundaries, message):
    q, k, v = inputs(8, None, dtype=torch.float32)
    with pytest.raises(JobFailed, match=message):
        vision.attend_packed(q, k, v, boundaries, scale=1.0)


@pytest.mark.parametrize(("wide", "message"), [(769, "heads of 769: 1 to 768"), (8, "float64")])
def test_what_the_documentation_forbids_is_refused_by_the_emulated_operator(wide, message):
    dtype = torch.float64 if message == "float64" else torch.float32
    q, k, v = inputs(4, None, heads=1, groups=1, qk=wide, v=wide, dtype=dtype)
    with pytest.raises(ContractViolation, match=message):
        vision.attend_packed(q, k, v, (0, 4), scale=1.0)


@pytest.mark.parametrize("case", packed.TOWERS, ids=lambda case: case.family)
def test_a_whole_tower_computes_what_torchs_attention_does_in_one_call_of_each_layer(case, calls):
    pytest.importorskip("transformers")
    packed.agrees(case, vision.attend_packed)
    for call in calls:
        assert call["atten_mask"] is None and call["sparse_mode"] == attention.DEFAULT_MODE
    assert [call["actual_seq_qlen"] for call in calls] == packed.ends(case)
