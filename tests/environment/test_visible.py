"""The visibility variables: what the drivers do with them, and that no value breaks the parsers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle.environment.ascend import select_visible as ascend
from bundle.environment.nvidia import select_visible as cuda

UUIDS = ["GPU-9ab8988a-1c9b-8b57-3a2f-13f3e28bef1e", "GPU-9b8f4456-07bf-1b96-1a42-2a7721ba8774"]

# Measured on two H200s, driver 580.159.04: cuInit's result, then the UUIDs in CUDA's order.
MEASURED = [
    ("0,2,-1,1", (0,)),
    ("1, 0", (1, 0)),
    ("01", (1,)),
    (" 1", (1,)),
    ("1 ,0", (1, 0)),
    ("+1", (1,)),
    ("1x", (1,)),
    ("", ()),
    ("-1", ()),
    ("0x1", (0,)),
    ("0,,1", (0,)),
    ("1,0,", (1, 0)),
    (UUIDS[1], (1,)),
    ("GPU-9b8f4", (1,)),
    ("GPU-", ()),
    ("GPU-ffff", ()),
    (UUIDS[1].lower(), ()),
    (f"{UUIDS[1]},0", (1,)),
    (f"0,{UUIDS[1]}", (0,)),
    (UUIDS[1].removeprefix("GPU-"), ()),
    (f"{UUIDS[1]} ", (1,)),
    (f" {UUIDS[1]}", ()),
    ("GPU-9b8f4 ", ()),
]


def test_where_a_list_ends_is_said_and_nothing_of_a_whole_one(messages):
    for reason, entry in ((cuda("0,7", UUIDS).reason, "'7'"), (ascend("0, 1", 2).reason, "' 1'")):
        assert entry in reason
        messages(reason)
    assert cuda("1,0", UUIDS).reason == "CUDA_VISIBLE_DEVICES=1,0"
    assert ascend("0,1", 2).reason.endswith("_VISIBLE_DEVICES=0,1")


@pytest.mark.parametrize(("value", "chosen"), MEASURED)
def test_cuda_as_the_driver_does(value, chosen):
    selection = cuda(value, UUIDS)
    assert selection.chosen == chosen
    assert selection.fault is None


@pytest.mark.parametrize("value", ["0,0", f"{UUIDS[1]},{UUIDS[1]}", "0,1,0"])
def test_cuda_refuses_a_device_named_twice(value):
    selection = cuda(value, UUIDS)
    assert selection.chosen == ()
    assert selection.fault is not None
    assert value in selection.fault


def test_cuda_unset_shows_all():
    assert cuda(None, UUIDS).chosen == (0, 1)


INSTANCES = ["MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb"]


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        (None, (0,)),
        (INSTANCES[1], (1,)),
        (f"{INSTANCES[1]},{INSTANCES[0]}", (1,)),
        ("MIG-cba", (1,)),
        ("0", (0,)),
        ("1", ()),
        ("", ()),
        ("MIG-c", ()),
    ],
)
def test_mig_shows_one_instance(value, chosen):
    assert cuda(value, UUIDS, INSTANCES).chosen == chosen


@given(st.permutations(range(8)), st.integers(0, 8), st.sampled_from(["", " ", "\t"]))
def test_cuda_keeps_the_order(order, length, blank):
    value = ",".join(blank + str(index) for index in order[:length])
    uuids = [f"GPU-{index}" for index in range(8)]
    assert cuda(value, uuids).chosen == tuple(order[:length])


@given(
    st.permutations(range(8)),
    st.integers(0, 7),
    st.sampled_from(["8", "-1", "x", "", "99999999999999999999"]),
)
def test_cuda_is_cut_at_the_first_wrong_entry(order, at, wrong):
    entries = [str(index) for index in order]
    entries.insert(at, wrong)
    assert cuda(",".join(entries), [f"GPU-{index}" for index in range(8)]).chosen == tuple(order[:at])


@given(st.text(), st.integers(0, 9))
def test_no_value_breaks_a_parser(value, count):
    for selection in (cuda(value, [f"GPU-{index}" for index in range(count)]), ascend(value, count)):
        assert len(set(selection.chosen)) == len(selection.chosen)
        assert all(0 <= at < count for at in selection.chosen)
        assert selection.reason


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        (None, (0, 1, 2, 3)),
        ("0,1", (0, 1)),
        ("1,3", (1, 3)),
        ("1, 2,3", (1,)),
        (" 1", ()),
        ("0,7,1", (0,)),
        ("0,1x,2", (0,)),
        ("", ()),
        ("0,-1", (0,)),
        ("٣", ()),
    ],
)
def test_ascend_stops_at_the_first_wrong_entry(value, chosen):
    selection = ascend(value, 4)
    assert selection.chosen == chosen
    assert selection.fault is None


@given(st.lists(st.integers(0, 7), min_size=1, max_size=8))
def test_ascend_wants_ascending_ids(ids):
    selection = ascend(",".join(map(str, ids)), 8)
    if ids == sorted(set(ids)):
        assert (selection.chosen, selection.fault) == (tuple(ids), None)
    else:
        assert selection.chosen == ()
        assert selection.fault is not None
        assert selection.fault.endswith("=" + ",".join(map(str, sorted(set(ids)))))
