"""What the emulated NPUs compute and refuse, before anything is trained on them."""

import json

import pytest

from bundle.capabilities.ascend import REPLACEMENT_REASON_BY_TORCH_NAME
from bundle.capabilities.cpu import REPLACEMENT_REASON_BY_TORCH_NAME as CPU
from tests.npu.child import emulated
from tests.npu.probing import cases
from tests.world import BACKEND, World

pytestmark = pytest.mark.npu


@pytest.fixture(scope="module")
def outcomes(plugins):
    """What was wrong in each case, by rank."""
    with World(environ={BACKEND: "ascend", **emulated(str(plugins))}) as world:
        return [json.loads(out.splitlines()[-1]) for out in world.run("tests.npu.probing", 2)]


@pytest.mark.parametrize("case", list(cases()))
def test_emulated_npus(outcomes, case):
    for rank, outcome in enumerate(outcomes):
        assert outcome[case] == "", f"rank {rank}"


def test_what_is_replaced_is_what_is_listed_and_on_the_cpu_nothing_but_its_own(both):
    npu, cpu = (
        json.loads(world.run("tests.npu.seams", 1, timeout=1800)[0].splitlines()[-1])
        for world in (both.npu, both.cpu)
    )
    assert set(npu) == set(REPLACEMENT_REASON_BY_TORCH_NAME)
    assert set(cpu) == REPLACEMENT_REASON_BY_TORCH_NAME.keys() & CPU.keys()
