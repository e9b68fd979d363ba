"""What transformers computes with random weights of models that see images, written once."""

from pathlib import Path

import pytest

from tests.vision import reference
from tests.vision.cases import CASES


@pytest.fixture(scope="session")
def seen(tmp_path_factory) -> Path:
    """A directory for each case with what transformers computes."""
    pytest.importorskip("transformers")
    directory: Path = tmp_path_factory.mktemp("vision")
    for case in CASES:
        reference.write(case, directory / case.name)
    return directory
