"""Every family computes what transformers' own class does: log-probs, entropies and loss of one sequence."""

import json
from pathlib import Path

import pytest

from tests.families import reference
from tests.families.cases import CASES

AGREES = 1e-5  # nats


@pytest.fixture(scope="session")
def references(tmp_path_factory) -> Path:
    """A directory for each case with what transformers computes."""
    pytest.importorskip("transformers")
    directory: Path = tmp_path_factory.mktemp("families")
    for case in CASES:
        reference.write(case, directory / case.name)
    return directory


@pytest.mark.world
def test_every_family_computes_what_transformers_does(references, core):
    (said,) = core.world.run("tests.families.rank", 1, str(references), timeout=300)
    found = json.loads(said.splitlines()[-1])
    assert found.keys() == {case.name for case in CASES}
    assert not {name: distance for name, distance in found.items() if not distance <= AGREES}
