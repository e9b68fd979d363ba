"""A patch without a criterion of its history is found here, not by the long tests of all releases."""

from tests.history.truth import PRESENT
from tools.patches import review


def test_there_is_a_criterion_for_all_that_is_in_the_list():
    assert set(PRESENT) == {entry.id for entry in review.ENTRIES}
