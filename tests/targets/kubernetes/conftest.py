import pytest

from bundle.launch.job import Job
from tests.targets.kubernetes.jobs import planned


@pytest.fixture(scope="session")
def wide() -> Job:
    return planned(4, 8, "cuda", "h200", "train.global_batch_size=256")


@pytest.fixture(scope="session")
def npus() -> Job:
    return planned(2, 16, "ascend", "a3", "train.global_batch_size=256")


@pytest.fixture(scope="session")
def small() -> Job:
    return planned(2, 1, "cpu", "cpu")


@pytest.fixture(scope="session")
def alone() -> Job:
    return planned(1, 8, "cuda", "h200", "train.global_batch_size=64")


@pytest.fixture(scope="session")
def jobs(wide, npus, small, alone) -> list[Job]:
    return [wide, npus, small, alone]
