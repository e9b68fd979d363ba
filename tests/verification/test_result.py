"""How the runs of a check are judged."""

import pytest

from bundle.verification.check import CHECKS_BY_PATCH_ID, Check, Gap, Observation, Raises, Status, judge

CHECK = Check(
    measurement="m:f",
    without=(Raises("TypeError", "padding_mask"), Gap(0.1)),
    agreement=1e-5,
)
FINE = Observation(gap=1e-6)
TYPE_ERROR = Observation(raised="TypeError Exception object", message="unexpected 'padding_mask'")


@pytest.mark.parametrize(
    ("without", "with_it", "status"),
    [
        ([Observation(gap=0.5)], [FINE], Status.PROVEN),
        ([TYPE_ERROR], [FINE], Status.PROVEN),
        ([Observation(raised="Mine TypeError Exception", message="padding_mask")], [FINE], Status.PROVEN),
        ([Observation(raised="RuntimeError", message="peer"), TYPE_ERROR], [FINE, FINE], Status.PROVEN),
        ([Observation(gap=float("nan"))], [FINE], Status.PROVEN),
        ([FINE], [FINE], Status.FAILED),  # the defect is not there
        ([Observation(raised="KeyError", message="padding_mask")], [FINE], Status.FAILED),
        ([Observation(raised="TypeError", message="something else")], [FINE], Status.FAILED),
        ([TYPE_ERROR], [Observation(gap=1e-4)], Status.FAILED),
        ([TYPE_ERROR], [Observation(gap=float("nan"))], Status.FAILED),
        ([TYPE_ERROR], [FINE, Observation(raised="Died")], Status.FAILED),
        ([TYPE_ERROR], [Observation(unprovable="one device")], Status.NOT_PROVABLE),
    ],
)
def test_proven_takes_the_declared_failure_without_and_agreement_with(without, with_it, status):
    assert judge("p", CHECK, without, with_it).status is status


def test_a_failed_result_says_what_was_seen_and_what_was_expected():
    reason = judge("p", CHECK, [FINE], [Observation(gap=1.0)]).reason
    for part in ("gap 1.0e-06", "gap 1.0e+00", "TypeError: padding_mask or a gap of at least 0.1", "1e-05"):
        assert part in reason


def test_a_gap_that_would_pass_with_the_patch_is_no_failure_without():
    for check in CHECKS_BY_PATCH_ID.values():
        for failure in check.without:
            assert not isinstance(failure, Gap) or failure.at_least > 10 * check.agreement
