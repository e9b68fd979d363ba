"""megatron's .bin and .idx: what its own builder writes is read, and what we write its own reader reads."""

import os
import subprocess
import sys
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bundle.data.store import IndexedWriter, read_indexed
from tests.matrix.fetch import newest_of_each_minor

indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")

DTYPES = (np.uint8, np.int8, np.uint16, np.int16, np.int32, np.int64)
# Documents of sequences of ids; a document may have no sequence, a sequence no id.
DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 120), max_size=5), max_size=3), max_size=6)


def build(prefix, documents, dtype=np.int32):
    """What megatron's tools/preprocess_data.py writes with --split-sentences."""
    builder = indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequences in documents:
        for ids in sequences:
            builder.add_item(torch.tensor(ids, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


@given(DOCUMENTS, st.sampled_from(DTYPES))
def test_what_megatron_wrote_is_read_by_document(tmp_path_factory, documents, dtype):
    prefix = tmp_path_factory.mktemp("built") / "some.text"
    build(prefix, documents, dtype)
    found = read_indexed(prefix)
    flat = [list(chain(*sequences)) for sequences in documents]
    assert found.values.tolist() == list(chain(*flat)) and found.values.dtype == dtype
    places = zip(np.cumsum(found.lengths) - found.lengths, found.lengths, strict=True)
    assert [found.values[start : start + length].tolist() for start, length in places] == flat


@given(st.lists(st.lists(st.integers(0, 120), min_size=1, max_size=9), min_size=1), st.sampled_from(DTYPES))
def test_what_we_write_megatron_reads_and_would_have_written(tmp_path_factory, documents, dtype):
    folder = tmp_path_factory.mktemp("written")
    writer = IndexedWriter(folder / "ours.v1", np.dtype(dtype).newbyteorder("<").str.removeprefix("|"))
    for ids in documents:
        writer.add(np.asarray(ids, np.uint32))
    writer.finish()
    build(folder / "theirs", [[ids] for ids in documents], dtype)
    for suffix in (".bin", ".idx"):
        assert (folder / f"ours.v1{suffix}").read_bytes() == (folder / f"theirs{suffix}").read_bytes()
    theirs = indexed_dataset.IndexedDataset(str(folder / "ours.v1"))
    assert [ids.tolist() for ids in theirs[:]] == documents


INDEX = {  # what is done to the index of two documents of 3 and 2 ids of int32: offset, bytes, what is said
    "mark": (0, b"X", "not begin"),
    "version": (9, b"\x02", "not begin"),
    "type": (17, b"\x63", "code 99"),
    "floats": (17, b"\x07", "code 7"),
    "more sequences": (18, b"\xff", "is truncated"),
    "a longer sequence": (34, b"\x04", "sequences"),
    "a place": (42 + 8, b"\x10", "sequences"),
    "a negative length": (34 + 7, b"\xff", "sequences"),
    "documents": (58 + 8, b"\x05", "documents"),
    "the first document": (58, b"\x01", "documents"),
    "the last document": (58 + 16, b"\x01", "documents"),
    "no documents": (26, b"\x00", "documents"),
}


@pytest.mark.parametrize("name", INDEX)
def test_a_damaged_index_is_said_to_be_one(tmp_path, name, messages):
    build(tmp_path / "x", [[[1, 2, 3]], [[4, 5]]])
    offset, replaced, why = INDEX[name]
    path = tmp_path / "x.idx"
    content = path.read_bytes()
    path.write_bytes(content[:offset] + replaced + content[offset + len(replaced) :])
    with pytest.raises(ValueError, match=why) as error:
        read_indexed(tmp_path / "x")
    messages(error.value)


@pytest.mark.parametrize(("suffix", "bytes_left"), [(".bin", -1), (".idx", -1), (".idx", 20), (".idx", 0)])
def test_a_file_that_is_cut_is_refused(tmp_path, suffix, bytes_left, messages):
    build(tmp_path / "x", [[[1, 2, 3]], [[4, 5]]])
    path = tmp_path / f"x{suffix}"
    path.write_bytes(path.read_bytes()[:bytes_left])
    with pytest.raises(ValueError, match=rf"/x\{suffix}") as error:
        read_indexed(tmp_path / "x")
    messages(error.value)


def test_tokens_that_no_index_names_are_refused(tmp_path, messages):
    build(tmp_path / "x", [[[1, 2, 3]]])
    with (tmp_path / "x.bin").open("ab") as file:
        file.write(bytes(4))
    with pytest.raises(ValueError, match=r"16 bytes .* 12 ") as error:
        read_indexed(tmp_path / "x")
    messages(error.value)


def test_the_modes_of_multimodal_data_are_passed_over(tmp_path):
    builder = indexed_dataset.IndexedDatasetBuilder(f"{tmp_path / 'x'}.bin", multimodal=True)
    builder.add_item(torch.tensor([1, 2]), mode=1)
    builder.end_document()
    builder.finalize(f"{tmp_path / 'x'}.idx")
    assert read_indexed(tmp_path / "x").values.tolist() == [1, 2]


WRITING = """
import sys, torch, numpy
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
builder = IndexedDatasetBuilder("theirs.bin", dtype=numpy.uint16)
for document in ([[1, 2, 3], [4]], [[500]], []):
    for ids in document:
        builder.add_item(torch.tensor(ids))
    builder.end_document()
builder.finalize("theirs.idx")
ours = IndexedDataset("ours")  # whose memory its slices are
print([ids.tolist() for ids in ours[:]])
"""


@pytest.mark.releases
@pytest.mark.parametrize("version", newest_of_each_minor())
def test_every_minor_writes_what_is_read_and_reads_what_is_written(tmp_path, release, version):
    writer = IndexedWriter(tmp_path / "ours", "<i4")
    for ids in ([7, 8], [70_000]):
        writer.add(np.asarray(ids))
    writer.finish()
    environment = os.environ | {"PYTHONPATH": str(release(version))}
    command = [sys.executable, "-W", "ignore", "-c", WRITING]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[[7, 8], [70000]]"
    found = read_indexed(tmp_path / "theirs")
    assert found.values.tolist() == [1, 2, 3, 4, 500] and found.lengths.tolist() == [4, 1, 0]
