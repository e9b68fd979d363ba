import threading
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from bundle.distributed.world import agree_on_fields, find_disagreements, share_decision
from bundle.errors import BundleError, EnvironmentUnfit, PatchError, TargetUnavailable
from bundle.launch.outcomes import format_ranks


def meet(said: list[dict[str, str] | None], seconds: float = 30) -> list[BundleError | None]:
    """What each rank that comes (None stays away) is told."""
    store = HashStore()
    told: list[BundleError | None] = [None] * len(said)

    def come(rank: int, fields: dict[str, str]) -> None:
        try:
            agree_on_fields(store, rank, len(said), fields, timedelta(seconds=seconds))
        except BundleError as error:
            told[rank] = error

    threads = [
        threading.Thread(target=come, args=(r, fields)) for r, fields in enumerate(said) if fields is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return told


def test_equal_plans_are_agreed_on():
    assert meet([{"plan": "a", "patches": "b"}] * 3) == [None] * 3


def test_a_difference_is_told_to_every_rank_with_the_field_and_the_ranks(messages):
    told = meet([{"plan": "a", "patches": "x"}, {"plan": "a", "patches": "y"}, {"plan": "a"}])
    messages(told[0])
    for error in told:
        assert isinstance(error, EnvironmentUnfit) and str(error) == str(told[0])
        (violation,) = error.violations
        assert violation.startswith("patches") and "0: x" in violation and "1: y" in violation


def test_ranks_that_do_not_come_are_named(messages):
    told = meet([{"plan": "a"}, None, {"plan": "a"}, None], seconds=0.3)
    assert isinstance(told[0], TargetUnavailable)
    assert isinstance(told[2], TargetUnavailable)
    messages(told[2])
    assert "ranks 1, 3" in str(told[2])


def test_a_rank_that_comes_again_has_met_an_earlier_start_and_does_not_stay(messages):
    store = HashStore()
    agree_on_fields(store, 0, 1, {"plan": "a"}, timedelta(seconds=30))
    with pytest.raises(TargetUnavailable, match="rank 0") as refused:
        agree_on_fields(store, 0, 1, {"plan": "a"}, timedelta(seconds=30))
    messages(refused.value)


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([0, 1, 2, 7], "ranks 0-2, 7"), ([5, 4], "ranks 4-5")]
)
def test_ranks_are_listed_shortly(ranks, text):
    assert format_ranks(ranks) == text


FIELDS = st.dictionaries(st.sampled_from("abc"), st.sampled_from("xy"))


@given(st.lists(FIELDS, min_size=1, max_size=6))
def test_disagreements_are_exactly_the_fields_that_differ(said):
    differing = {n for n in "abc" if len({fields.get(n) for fields in said}) > 1}
    assert {line[0] for line in find_disagreements(said)} == differing


def test_what_makes_a_rank_unfit_is_told_to_all():
    store, told = HashStore(), {}

    def come(rank: int) -> None:
        unfit = ["x.py differs"] if rank else []
        with pytest.raises(EnvironmentUnfit) as raised:
            agree_on_fields(store, rank, 3, {"job": "a"}, timedelta(seconds=30), unfit)
        told[rank] = raised.value.violations

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert told == dict.fromkeys(range(3), ("ranks 1-2: x.py differs",))


@pytest.mark.parametrize("refused", [False, True])
def test_what_rank_0_decides_or_refuses_is_everybody_s(refused):
    store, told = HashStore(), {}
    decisions = []

    def decide() -> str:
        decisions.append(threading.get_ident())
        if refused:
            raise PatchError("drifted")
        return "a job"

    def come(rank: int) -> None:
        try:
            told[rank] = share_decision(store, rank, 3, decide, timedelta(seconds=30))
        except BundleError as error:
            told[rank] = f"{error.code:d} {error}"

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert told == dict.fromkeys(range(3), "4 drifted" if refused else "a job") and len(decisions) == 1


def test_a_first_rank_that_decides_nothing_is_said(messages):
    with pytest.raises(TargetUnavailable, match="rank 0") as refused:
        share_decision(HashStore(), 1, 2, lambda: "", timedelta(seconds=0.2))
    messages(refused.value)
