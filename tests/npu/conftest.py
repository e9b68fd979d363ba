"""These tests need the real torch-npu and the libraries that `python -m tests.npu` builds."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bundle.environment.packages import detect
from tests.matrix.test_layouts import newest_of_each_minor
from tests.npu.child import emulated
from tests.npu.emulation import plugin
from tests.world import BACKEND, World


@pytest.fixture(autouse=True, scope="session")
def stand_in() -> None:
    if "STAND_IN_LIBRARIES" not in os.environ:
        pytest.skip("torch-npu is looked at by `make npu-contract` only")


@pytest.fixture(scope="session")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What must be on PYTHONPATH for torch to load the emulation."""
    return plugin(tmp_path_factory.mktemp("npu") / "plugin")


class Both(NamedTuple):
    """Ranks on emulated NPUs and on the cpu, with one megatron-core and one torch."""

    version: str
    npu: World
    cpu: World


RELEASES = ("installed", "oldest", "newest")


@pytest.fixture(scope="session", params=RELEASES)
def both(request: pytest.FixtureRequest, plugins: Path) -> Iterator[Both]:
    """Both worlds with the installed megatron-core, the oldest minor's, and the newest's."""
    if request.param == "installed":
        core, tree = detect().megatron.core, None
        assert core is not None and core.version is not None
        version = core.version
    else:
        trees = request.getfixturevalue("release_trees")
        version = newest_of_each_minor(trees)[0 if request.param == "oldest" else -1]
        tree = trees[version]
    if request.param == "newest" and importlib.util.find_spec("triton") is None:
        pytest.skip(f"megatron-core {version} imports triton, which is not installed")
    npus = World(tree, megatron=True, environ={BACKEND: "ascend", **emulated(str(plugins))})
    with npus, World(tree, megatron=True, environ={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}) as cpus:
        yield Both(version, npus, cpus)
