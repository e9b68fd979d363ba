"""Every family computes what transformers' own class does: log-probs, entropies and loss of one sequence."""

import json
import os
from pathlib import Path

import pytest

from tests import world
from tests.families import reference
from tests.families.cases import CASES
from tests.matrix.test_layouts import newest_of_each_minor

AGREES = 1e-5  # nats


@pytest.fixture(scope="session")
def references(tmp_path_factory) -> Path:
    """A directory for each case with what transformers computes."""
    pytest.importorskip("transformers")
    pytest.importorskip("megatron.core")
    directory: Path = tmp_path_factory.mktemp("families")
    for case in CASES:
        reference.write(case, directory / case.name)
    return directory


def wrong(directory: Path, tree: Path | None) -> dict[str, float]:
    """The cases that are too far from transformers in a release."""
    before = os.environ.get("PYTHONPATH")
    path = [str(Path(__file__).parents[2]), *([str(tree)] if tree else []), *([before] if before else [])]
    environ = {"PYTHONPATH": os.pathsep.join(path)}
    (said,) = world.run("tests.families.rank", 1, str(directory), timeout=300, environ=environ)
    found = json.loads(said.splitlines()[-1])
    assert found.keys() == {case.name for case in CASES}
    return {name: distance for name, distance in found.items() if not distance <= AGREES}


@pytest.mark.world
def test_default_release(references):
    assert not wrong(references, None)


@pytest.mark.releases
@pytest.mark.world
def test_every_minor(references, release_trees):
    found = {}
    for release in newest_of_each_minor(release_trees):
        if bad := wrong(references, release_trees[release]):
            found[release] = bad
    assert not found
