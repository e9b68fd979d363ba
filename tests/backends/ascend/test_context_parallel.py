"""Core attention of ascend over two context-parallel ranks, which are real processes over gloo."""

import json

import pytest

from tests.backends.ascend.context_parallel import cases
from tests.world import Core

pytestmark = pytest.mark.world


@pytest.fixture(scope="module")
def outcomes(installed: Core) -> list[dict[str, str]]:
    """What was wrong in each case, by rank; one pair of processes runs them all."""
    ranks = installed.world.run("tests.backends.ascend.context_parallel", 2)
    return [json.loads(out.splitlines()[-1]) for out in ranks]


@pytest.mark.parametrize("case", list(cases()))
def test_equals_one_rank(outcomes, case):
    for rank, outcome in enumerate(outcomes):
        assert outcome[case] == "", f"rank {rank}"
