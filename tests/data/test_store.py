"""The token store: whole or not there."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bundle.data.sources import DataErrors
from bundle.data.store import RowChunk, TokenDocument, open_store
from bundle.data.store import write_store as write_chunks
from bundle.errors import JobFailed


def write(path, documents, vocabulary, errors=None):
    """Writes a store of one chunk."""
    errors = errors or DataErrors("skip")
    write_chunks(
        path,
        vocabulary,
        lambda _: iter([RowChunk([[document] for document in documents], errors.drain_report())]),
        errors,
        lambda _: None,
    )


def documents(count=3):
    return (TokenDocument(np.arange(n + 1, dtype=np.uint32)) for n in range(count))


def test_what_was_written_is_mapped_back(tmp_path):
    errors = DataErrors("skip")
    errors.record_corrupt_data("file:1", "wrong")
    write(tmp_path / "s", documents(), 300, errors)
    store = open_store(tmp_path / "s")
    assert store is not None and store.loss_mask is None
    assert store.ids.tolist() == [0, 0, 1, 0, 1, 2] and store.ids.dtype == np.uint16
    assert (store.document_starts.tolist(), store.lengths.tolist()) == ([0, 1, 3], [1, 2, 3])
    assert store.facts["skipped"] == ["file:1: wrong"] and store.facts["skipped_count"] == 1
    assert len(store.facts["sha256"]) == 64


def test_large_vocabularies_and_masks(tmp_path):
    mask = np.asarray([True, False])
    write(tmp_path / "s", iter([TokenDocument(np.asarray([70_000, 1], np.uint32), mask)]), 100_000)
    store = open_store(tmp_path / "s")
    assert store is not None and store.loss_mask is not None
    assert store.ids.tolist() == [70_000, 1] and store.loss_mask.tolist() == [True, False]


def test_the_digest_sees_tokens_boundaries_and_masks(tmp_path):
    one = np.asarray([1, 2, 3], np.uint32)
    variants = [
        [TokenDocument(one)],
        [TokenDocument(one[:1]), TokenDocument(one[1:])],
        [TokenDocument(one[::-1])],
        [TokenDocument(one, np.asarray([True, True, True]))],
    ]
    digests = set()
    for index, variant in enumerate(variants):
        write(tmp_path / str(index), iter(variant), 10)
        store = open_store(tmp_path / str(index))
        assert store is not None
        digests.add(store.facts["sha256"])
    assert len(digests) == len(variants)


def test_nothing_half_written_stays(tmp_path):
    def broken():
        yield TokenDocument(np.zeros(4, np.uint32))
        raise JobFailed("the source broke")

    with pytest.raises(JobFailed, match="source broke"):
        write(tmp_path / "s", broken(), 10)
    assert list(tmp_path.iterdir()) == [] and open_store(tmp_path / "s") is None


def test_all_of_it_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino))
    rename, renamed = Path.rename, []

    def record_rename(path: Path, target: Path) -> Path:
        renamed.append(set(synced))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", record_rename)
    write(tmp_path / "s", documents(), 300)
    places = [tmp_path / "s", *(tmp_path / "s").iterdir()]
    assert {"tokens.bin", "tokens.idx"} < {path.name for path in places}
    assert {path.stat().st_ino for path in places} <= renamed[-1]


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx", "learned.bin", "learned.idx", "facts.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_store_is_named(tmp_path, name, damage):
    masked = (TokenDocument(one.ids, one.ids > 0) for one in documents())
    write(tmp_path / "s", masked, 300)
    path = tmp_path / "s" / name
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-2])
    else:
        path.unlink()
    with pytest.raises(JobFailed, match=f"{tmp_path}/s: damaged"):
        open_store(tmp_path / "s")


def test_a_loss_mask_of_other_documents_is_damage(tmp_path, messages):
    mask = np.asarray([True, False, True])
    write(tmp_path / "s", iter([TokenDocument(mask.astype(np.uint32), mask)]), 300)
    cut = (TokenDocument(part.astype(np.uint32), part) for part in (mask[:1], mask[1:]))
    write(tmp_path / "other", cut, 300)
    for suffix in ("bin", "idx"):
        (tmp_path / "other" / f"learned.{suffix}").rename(tmp_path / "s" / f"learned.{suffix}")
    with pytest.raises(JobFailed, match=f"{tmp_path}/s: damaged") as error:
        open_store(tmp_path / "s")
    messages(error.value)


def test_a_full_disk_is_a_failed_job_and_leaves_nothing(tmp_path, messages):
    program = f"""
import resource, signal, sys, numpy as np
from pathlib import Path
from bundle.errors import JobFailed
from tests.data.test_store import TokenDocument, write
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write(Path({str(tmp_path)!r}) / "s", iter([TokenDocument(np.zeros(10**6, np.uint32))]), 10)
except JobFailed as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "File too large" in done.stdout and f"{tmp_path}/s" in done.stdout, done.stderr
    messages(done.stdout)
    assert list(tmp_path.iterdir()) == []
