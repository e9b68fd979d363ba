"""The token store: whole or not there."""

import subprocess
import sys
import threading

import numpy as np
import pytest

from bundle.data.store import Document, key_of, open_store, write
from bundle.errors import JobFailed


def documents(count=3):
    return (Document(np.arange(n + 1, dtype=np.uint32)) for n in range(count))


def test_what_was_written_is_mapped_back(tmp_path):
    write(tmp_path / "s", documents(), 300, lambda: {"said": 1})
    store = open_store(tmp_path / "s")
    assert store is not None and store.learned is None
    assert store.ids.tolist() == [0, 0, 1, 0, 1, 2] and store.ids.dtype == np.uint16
    assert (store.starts.tolist(), store.lengths.tolist()) == ([0, 1, 3], [1, 2, 3])
    assert store.facts["said"] == 1 and len(store.facts["sha256"]) == 64


def test_large_vocabularies_and_masks(tmp_path):
    mask = np.asarray([True, False])
    write(tmp_path / "s", iter([Document(np.asarray([70_000, 1], np.uint32), mask)]), 100_000, dict)
    store = open_store(tmp_path / "s")
    assert store is not None and store.learned is not None
    assert store.ids.tolist() == [70_000, 1] and store.learned.tolist() == [True, False]


def test_the_digest_sees_tokens_boundaries_and_masks(tmp_path):
    one = np.asarray([1, 2, 3], np.uint32)
    variants = [
        [Document(one)],
        [Document(one[:1]), Document(one[1:])],
        [Document(one[::-1])],
        [Document(one, np.asarray([True, True, True]))],
    ]
    digests = set()
    for index, variant in enumerate(variants):
        write(tmp_path / str(index), iter(variant), 10, dict)
        store = open_store(tmp_path / str(index))
        assert store is not None
        digests.add(store.facts["sha256"])
    assert len(digests) == len(variants)


def test_nothing_half_written_stays(tmp_path):
    def broken():
        yield Document(np.zeros(4, np.uint32))
        raise JobFailed("the source broke")

    with pytest.raises(JobFailed, match="source broke"):
        write(tmp_path / "s", broken(), 10, dict)
    assert list(tmp_path.iterdir()) == [] and open_store(tmp_path / "s") is None


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx", "learned.bin", "learned.idx", "facts.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_store_is_named(tmp_path, name, damage):
    masked = (Document(one.ids, one.ids > 0) for one in documents())
    write(tmp_path / "s", masked, 300, dict)
    path = tmp_path / "s" / name
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    with pytest.raises(JobFailed, match=r"damaged.*delete it"):
        open_store(tmp_path / "s")


def test_a_loss_mask_of_other_documents_is_damage(tmp_path):
    mask = np.asarray([True, False, True])
    write(tmp_path / "s", iter([Document(mask.astype(np.uint32), mask)]), 300, dict)
    cut = (Document(part.astype(np.uint32), part) for part in (mask[:1], mask[1:]))
    write(tmp_path / "other", cut, 300, dict)
    for suffix in ("bin", "idx"):
        (tmp_path / "other" / f"learned.{suffix}").rename(tmp_path / "s" / f"learned.{suffix}")
    with pytest.raises(JobFailed, match="not of the same documents"):
        open_store(tmp_path / "s")


def test_writers_at_once_leave_one_whole_store(tmp_path):
    threads = [
        threading.Thread(target=write, args=(tmp_path / "s", documents(500), 300, dict)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = open_store(tmp_path / "s")
    assert store is not None and len(store.lengths) == 500
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_full_disk_is_a_failed_job_and_leaves_nothing(tmp_path):
    program = f"""
import resource, signal, sys, numpy as np
from pathlib import Path
from bundle.errors import JobFailed
from bundle.data.store import Document, write
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write(Path({str(tmp_path)!r}) / "s", iter([Document(np.zeros(10**6, np.uint32))]), 10, dict)
except JobFailed as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "cannot be written: File too large" in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_keys_depend_on_every_fact():
    assert len({key_of(facts) for facts in ([1], [2], ["1"], [1, 1], {"a": 1})}) == 5
