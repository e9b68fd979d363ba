"""Buffers: the rules of megatron-core's layout, and that shares add up."""

import math

from hypothesis import given
from hypothesis import strategies as st

from bundle.planning.memory import ParameterBuffer, is_shared_embedding_across_buckets
from bundle.planning.size import LocalParameter

parameters = st.lists(
    st.builds(
        LocalParameter,
        name=st.just("p"),
        shape=st.tuples(st.integers(1, 300)),
        shared_embedding=st.sampled_from([False, False, False, True]),
    ),
    min_size=1,
    max_size=12,
)


def owned(buffer):
    """(elements, tensors) of every rank."""
    kept = [[0, 0] for _ in range(buffer.ranks)]
    for rank, *change in buffer.iterate_element_and_tensor_deltas():
        for later in kept[rank:]:
            later[:] = [have + more for have, more in zip(later, change, strict=True)]
    return [tuple(each) for each in kept]


@given(parameters, st.integers(1, 9), st.none() | st.integers(1, 900))
def test_every_element_has_one_place_and_one_owner(tensors, ranks, bucket_size):
    buffer = ParameterBuffer.from_parameters(tensors, ranks, bucket_size)
    assert [span.parameter for span in buffer.spans] == tensors[::-1], "the last parameter comes first"
    assert all(span.end - span.start == span.parameter.elements for span in buffer.spans)
    assert all(span.start % 64 == 0 for span in buffer.spans)
    ends = [0, *(span.end for span in buffer.spans)]
    assert all(span.start >= before for span, before in zip(buffer.spans, ends, strict=False))
    assert sum(elements for elements, _ in owned(buffer)) == sum(p.elements for p in tensors)


@given(parameters, st.integers(1, 9), st.none() | st.integers(1, 900))
def test_buckets_are_adjacent_and_divide_between_ranks(tensors, ranks, bucket_size):
    buffer = ParameterBuffer.from_parameters(tensors, ranks, bucket_size)
    edges = [0, *(end for _, end in buffer.buckets)]
    assert [start for start, _ in buffer.buckets] == edges[:-1]
    assert all(end % math.lcm(ranks, 128) == 0 for end in edges)
    for span in buffer.spans:
        inside = [(a, b) for a, b in buffer.buckets if a <= span.start and span.end <= b]
        assert len(inside) == 1
        if span.parameter.shared_embedding:
            assert sum(inside[0][0] <= other.start < inside[0][1] for other in buffer.spans) == 1


@given(parameters, st.integers(1, 9))
def test_each_share_is_what_lies_in_its_range(tensors, ranks):
    buffer = ParameterBuffer.from_parameters(tensors, ranks)
    for rank, (elements, pieces) in enumerate(owned(buffer)):
        mine = [
            len(range(max(span.start, first + rank * share), min(span.end, first + (rank + 1) * share)))
            for first, last in buffer.buckets
            for share in [(last - first) // ranks]
            for span in buffer.spans
            if first <= span.start < last
        ]
        assert elements == sum(mine)
        assert pieces == sum(size > 0 for size in mine)


@given(parameters, st.integers(1, 9))
def test_one_bucket_unless_a_size_or_a_shared_embedding_asks_for_more(tensors, ranks):
    plain = [LocalParameter(p.name, p.shape) for p in tensors]
    assert len(ParameterBuffer.from_parameters(plain, ranks).buckets) == 1
    assert len(ParameterBuffer.from_parameters(plain, ranks, 1).buckets) == len(plain)


def test_no_parameters_no_buffer():
    assert ParameterBuffer.from_parameters([], 4).elements == 0


def test_where_0_12_cuts_the_shared_embedding():
    shared = LocalParameter("embedding", (1000,), shared_embedding=True)
    assert is_shared_embedding_across_buckets([shared, LocalParameter("p", (192,))], 2)
    assert not is_shared_embedding_across_buckets([shared, LocalParameter("p", (256,))], 2)
    assert not is_shared_embedding_across_buckets([shared, LocalParameter("p", (192,))], 5), (
        "then 0.12 rounds the start up as well"
    )
    assert not is_shared_embedding_across_buckets([LocalParameter("p", (192,)), shared], 2), (
        "nothing stands before it"
    )
    assert not is_shared_embedding_across_buckets([LocalParameter("p", (192,))], 2)
