"""What the emulated NPUs compute and refuse, before anything is trained on them."""

import json

import pytest

from tests.npu.child import emulated
from tests.npu.emulation import plugin
from tests.npu.probing import cases
from tests.world import BACKEND, World

pytestmark = pytest.mark.npu


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What was wrong in each case, by rank."""
    environ = emulated(str(plugin(tmp_path_factory.mktemp("emulation") / "plugin")))
    with World(environ={BACKEND: "ascend", **environ}) as world:
        return [json.loads(out.splitlines()[-1]) for out in world.run("tests.npu.probing", 2)]


@pytest.mark.parametrize("case", list(cases()))
def test_emulated_npus(outcomes, case):
    for rank, outcome in enumerate(outcomes):
        assert outcome[case] == "", f"rank {rank}"
