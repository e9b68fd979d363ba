"""What transformers computes with random weights of every family, written once."""

from pathlib import Path

import pytest

from tests.families import reference
from tests.families.cases import CASES


@pytest.fixture(scope="session")
def references(tmp_path_factory) -> Path:
    """A directory for each case with what transformers computes."""
    pytest.importorskip("transformers")
    directory: Path = tmp_path_factory.mktemp("families")
    for case in CASES:
        reference.write(case, directory / case.name)
    return directory
