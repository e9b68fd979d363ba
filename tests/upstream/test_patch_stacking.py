"""A patch that is put on once more for every model: verl's MTP patches are (1dda039b9, mtp_patch, patch).

Each engine that is made wraps what the one before has wrapped, and taking the patch off once leaves the
others on.
"""

import json

import pytest

from tests.world import World


@pytest.mark.world
@pytest.mark.slow
def test_a_patch_is_put_on_once_however_many_engines_are_made(core):
    """Put on while megatron is imported, as in a job: in a world of its own."""
    with World(core.tree) as world:
        meant, once, again, naive = json.loads(world.run("tests.upstream.stacking", 1)[0])
    assert naive == again + 2  # put on for each of two engines
    assert again == once == meant > 0
