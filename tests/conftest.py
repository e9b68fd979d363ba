"""Fixtures that several rooms' tests share."""

import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest
from hypothesis import settings
from packaging.version import Version

from bundle.environment.packages import detect
from tests.golden import messages, pytest_collection_modifyitems  # noqa: F401 - a fixture and a hook
from tests.matrix.fetch import newest_of_each_minor
from tests.must_have import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401 - hooks
from tests.record import proven, pytest_addoption, pytest_configure, record_fault  # noqa: F401 - hooks
from tests.world import Core, World

# A mistyped path in a test is not looked up on the Hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A shell's background job ignores SIGINT, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A busy machine is no failure: the time of an example says nothing about the code.
settings.register_profile("bundle", deadline=None)
settings.load_profile("bundle")


@pytest.fixture(scope="session")
def release_trees() -> dict[str, Path]:
    """Unpacked megatron-core releases by version, oldest first: the directories under $BUNDLE_RELEASES."""
    directory = os.environ.get("BUNDLE_RELEASES")
    if not directory:
        pytest.skip("BUNDLE_RELEASES names no directory of unpacked megatron-core releases")
    trees = {path.name: path for path in Path(directory).iterdir() if (path / "megatron/core").is_dir()}
    return {version: trees[version] for version in sorted(trees, key=Version)}


@pytest.fixture(scope="session")
def installed() -> Iterator[Core]:
    """The installed release; skips the test where there is none."""
    core = detect().megatron.core
    if core is None or core.version is None:
        pytest.skip("megatron-core is not installed")
    with World(megatron=True) as world:
        yield Core(core.version, None, world)


INSTALLED = "installed"


@pytest.fixture(
    scope="session",
    params=[INSTALLED, *(pytest.param(v, marks=pytest.mark.releases) for v in newest_of_each_minor())],
)
def core(request: pytest.FixtureRequest, release: Callable[[str], Path]) -> Iterator[Core]:
    """The installed release, and then, marked `releases`, the newest of every minor."""
    if request.param == INSTALLED:
        yield request.getfixturevalue("installed")
        return
    tree = release(request.param)
    with World(tree, megatron=True) as world:
        yield Core(request.param, tree, world)


@pytest.fixture(scope="session")
def release() -> Callable[[str], Path]:
    """Finds the tree of one release, unpacked or installed; skips the test where there is none."""
    directory = os.environ.get("BUNDLE_RELEASES")
    core = detect().megatron.core

    def find(version: str) -> Path:
        if directory and (Path(directory) / version / "megatron/core").is_dir():
            return Path(directory) / version
        if core is not None and core.version == version:
            return core.root
        pytest.skip(f"megatron-core {version} is neither installed nor under BUNDLE_RELEASES")

    return find


class _FacadeFirst(MetaPathFinder):
    """Has megatron imported under the facade on torch.cuda, whichever test imports it first."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "megatron.core":
            importlib.import_module("bundle.backends.cpu.facade").install()


sys.meta_path.insert(0, _FacadeFirst())


@pytest.fixture
def megatron() -> Iterator[None]:
    """In this test megatron can be called: the facade is installed and the test runs inside its context."""
    pytest.importorskip("megatron.core")
    facade = importlib.import_module("bundle.backends.cpu.facade")
    facade.install()
    with facade.megatron_calls():
        yield
    facade.uninstall()
