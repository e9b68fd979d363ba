"""Router replay and FP8: the padding that FP8 wants must be that of the routes, too.

verl (#5989, 9bda8b9ac) packed the tokens to FP8's multiple and the routes without it. The rows of a rank are
then those of other tokens; megatron's own replay takes them without a word. Here one Packing lays out both.
"""

import json

import pytest

from bundle.environment import packages


@pytest.mark.world
def test_routes_are_padded_as_the_tokens_are(core):
    first, second = map(json.loads, core.world.run("tests.seeds.router_replay_fp8", 2))
    for rank in (first, second):
        assert rank["rows"] == [14, 16]
        assert "[14, 2]" in rank["refused"] and "[16, 2]" in rank["refused"]
        assert "28 rows" in rank["tokens"]
        assert rank["equal"]
    if packages.is_base_version_within(core.version, ">=0.16"):
        assert 0 < first["misrouted"] < 0.2  # its last tokens have no experts at all
        assert second["misrouted"] > 0.5  # every token has those of the token two places later
