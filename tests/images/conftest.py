"""The engine, and the images that several tests run; without them the tests are skipped, and say why."""

from collections.abc import Iterator

import pytest

from tests.images import baking
from tests.images.engine import Engine
from tests.images.engine import engine as an_engine
from tests.images.machine import Passed
from tests.images.machine import passed as passed_here
from tests.images.tools import Missing


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """Builds and runs images; private engines end with the tests."""
    try:
        with an_engine() as made:
            yield made
    except Missing as missing:
        pytest.skip(f"not on this machine: {missing}")


@pytest.fixture(scope="session")
def passed(tmp_path_factory: pytest.TempPathFactory) -> Passed:
    """What builds on this machine are given."""
    return passed_here(tmp_path_factory.mktemp("passed"))


@pytest.fixture(scope="session")
def targets(engine: Engine, passed: Passed) -> dict[str, baking.Target]:
    """Every target of the bake file, as it can be built here."""
    try:
        return {
            name: baking.here(engine, target, passed)
            for name, target in baking.resolved(engine, "all").items()
        }
    except Missing as missing:
        pytest.skip(f"not on this machine: {missing}")


@pytest.fixture(scope="session")
def cpu(engine: Engine, targets: dict[str, baking.Target], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of the CPU image, built from this checkout."""
    name = "mcore-bundle:test-cpu"
    image = targets["cpu"] | {"tags": [name], "output": [{"type": "docker"}]}
    baking.build(engine, tmp_path_factory.mktemp("bake"), {"cpu": image})
    return name
