"""Every family computes what transformers' own class does: log-probs, entropies and loss of one sequence."""

import json

import pytest

from tests.families.cases import CASES

AGREES = 1e-5  # nats


@pytest.mark.world
def test_every_family_computes_what_transformers_does(references, core):
    (said,) = core.world.run("tests.families.rank", 1, str(references), timeout=300)
    found = json.loads(said.splitlines()[-1])
    assert found.keys() == {case.name for case in CASES}
    assert not {name: distance for name, distance in found.items() if not distance <= AGREES}


@pytest.mark.world
def test_loaded_weights_give_what_transformers_computes(references, core):
    (said,) = core.world.run("tests.families.loaded", 1, str(references), timeout=300)
    found = json.loads(said.splitlines()[-1])
    assert found.keys() == {case.name for case in CASES}
    assert not {name: distance for name, distance in found.items() if not distance <= AGREES}
