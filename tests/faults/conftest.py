"""What tests of faults have in common."""

from pathlib import Path

import pytest

from tests.command import finish, start_training
from tests.faults.harness import RECIPE, SECONDS, Faults
from tests.launch.test_faults import cgroup  # noqa: F401 - a fixture
from tests.launch.test_network import routed  # noqa: F401 - a fixture
from tests.record import Proven, RecordFault
from tests.targets.test_ray_runs import cluster as ray_cluster  # noqa: F401 - a fixture


@pytest.fixture
def faults(record_fault: RecordFault, proven: Proven, tmp_path: Path) -> Faults:
    return Faults(record_fault, proven, tmp_path)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The metrics of an undisturbed run of two ranks on this machine."""
    pytest.importorskip("megatron.core")
    directory = tmp_path_factory.mktemp("whole") / "run"
    finish(start_training("demo", directory, RECIPE), timeout=SECONDS)
    return directory / "metrics.jsonl"
