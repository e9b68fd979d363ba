"""Replacements in the layer of experts."""

from types import SimpleNamespace

import pytest

from bundle.replacements.moe import skip_sort_of_sorted_tokens


@pytest.mark.parametrize(("tp", "ep", "seen"), [(1, 1, 1), (1, 2, 4), (2, 1, 4)])
def test_a_rank_with_all_experts_counts_one_during_the_step_alone(tp: int, ep: int, seen: int):
    def read_count(self, states, *, bias):
        return self.num_local_experts, states + bias

    dispatcher = SimpleNamespace(tp_size=tp, ep_size=ep, num_local_experts=4)
    assert skip_sort_of_sorted_tokens(read_count)(dispatcher, 2, bias=3) == (seen, 5)
    assert dispatcher.num_local_experts == 4


def test_the_count_of_experts_comes_back_after_an_error():
    def fail(self):
        raise ValueError(self.num_local_experts)

    dispatcher = SimpleNamespace(tp_size=1, ep_size=1, num_local_experts=4)
    with pytest.raises(ValueError, match="1"):
        skip_sort_of_sorted_tokens(fail)(dispatcher)
    assert dispatcher.num_local_experts == 4
