"""The engine, and the images that several tests run; without them the tests are skipped, and say why."""

from collections.abc import Callable, Iterator

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
def target(engine: Engine, passed: Passed) -> Callable[[str], baking.Target]:
    """Finds a target of the bake file by its name, changed to what can be built here."""
    resolved = baking.resolved(engine, "all")

    def find(name: str) -> baking.Target:
        try:
            return baking.here(engine, resolved[name], passed)
        except Missing as missing:
            pytest.skip(f"not on this machine: {missing}")

    return find


@pytest.fixture(scope="session")
def cpu(
    engine: Engine, target: Callable[[str], baking.Target], tmp_path_factory: pytest.TempPathFactory
) -> str:
    """The name of the CPU image, built from this checkout."""
    name = "mcore-bundle:test-cpu"
    image = target("cpu") | {"tags": [name], "output": [{"type": "docker"}]}
    baking.build(engine, tmp_path_factory.mktemp("bake"), {"cpu": image})
    return name
