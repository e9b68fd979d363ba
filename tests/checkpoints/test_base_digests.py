import hashlib
import os
import random
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from bundle.checkpoints.base_digests import BackgroundDigests
from bundle.errors import JobFailed


@pytest.fixture(autouse=True)
def world(tmp_path: Path):
    """One rank of torch's process groups."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_it_starts_before_the_files_can_be_read_and_gathers_their_digests(tmp_path: Path):
    content = random.randbytes(3_000_000)
    (tmp_path / "first").write_bytes(content[:5])
    os.mkfifo(tmp_path / "second")  # whoever opens it waits for a writer
    writer = threading.Timer(2, (tmp_path / "second").write_bytes, args=(content,))
    writer.start()
    digests = BackgroundDigests([tmp_path / "first", tmp_path / "second"])
    assert writer.is_alive()
    wanted = {"first": hashlib.sha256(content[:5]).hexdigest(), "second": hashlib.sha256(content).hexdigest()}
    assert digests.gather() == wanted
    writer.join()
    (tmp_path / "first").unlink()
    assert digests.gather() == wanted


def test_a_file_that_cannot_be_read_fails_where_the_digests_are_needed(tmp_path: Path):
    digests = BackgroundDigests([tmp_path / "missing"])
    with pytest.raises(JobFailed) as error:
        digests.gather()
    assert str(tmp_path / "missing") in str(error.value)
