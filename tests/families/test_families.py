"""Every family computes what transformers' own class does: log-probs, entropies and loss of one sequence."""

import json

import pytest

from tests.families.cases import CASES
from tests.families.loaded import LAYOUTS, cases_of

AGREES = 1e-5  # nats


@pytest.mark.world
def test_every_family_computes_what_transformers_does(references, core):
    (said,) = core.world.run("tests.families.rank", 1, str(references), timeout=300)
    found = json.loads(said.splitlines()[-1])
    assert found.keys() == {case.name for case in CASES}
    assert not {name: distance for name, distance in found.items() if not distance <= AGREES}


@pytest.mark.world
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loaded_weights_give_what_transformers_computes(references, core, layout):
    ranks = 1 if layout == "one process" else 2
    said = core.world.run("tests.families.loaded", ranks, str(references), layout, timeout=500)
    found = json.loads(said[0].splitlines()[-1])
    assert found.keys() == {case.name for case in cases_of(layout)}
    assert not {name: distance for name, distance in found.items() if not distance <= AGREES}
