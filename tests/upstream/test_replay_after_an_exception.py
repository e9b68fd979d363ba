"""Router replay after a step that raised: later steps go on choosing that step's experts.

verl (1dda039b9) sets an action and targets on all routers, runs the step, and takes them away afterwards, not
in a `finally`. So it is done with megatron's own RouterReplay, too: its state is that of the process.
"""

import json

import pytest

BY_ITSELF, AS_GIVEN = [[6, 7]] * 3, [[0, 1], [2, 3], [4, 5]]


@pytest.fixture(scope="module")
def seen(core):
    chosen = json.loads(core.world.run("tests.upstream.replaying", 1)[0])
    if chosen is None:
        pytest.skip(f"megatron-core {core.version} cannot replay routes")
    return chosen


@pytest.mark.world
def test_a_global_action_outlives_the_step(seen):
    assert seen["global"] == {"before": BY_ITSELF, "inside": AS_GIVEN, "after": AS_GIVEN}


@pytest.mark.world
def test_choices_end_with_the_step(seen):
    assert seen["choices"] == {"before": BY_ITSELF, "inside": AS_GIVEN, "after": BY_ITSELF}
