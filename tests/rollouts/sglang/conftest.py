"""What tests of servers need of torch."""

from collections.abc import Iterator

import pytest
import torch.multiprocessing


@pytest.fixture(scope="module")
def share_by_names() -> Iterator[None]:
    """Memory of a CPU is opened by its name: descriptors go to children alone."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(strategy)
