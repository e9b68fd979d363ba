"""Directories that torch's own writer has made are read entry by entry; damaged ones are an error of ours."""

import contextlib
import dataclasses
import functools
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import checkpoint

from bundle.errors import BundleError, JobFailed, UsageError
from bundle.mcore.torch_dist import StackedTensorSlice, TorchDistCheckpoint, write

STACKED = torch.arange(4 * 3 * 5).reshape(4, 3, 5).float()


@pytest.fixture
def place(tmp_path):
    """A checkpoint of two tensors, of which each is one chunk."""
    state = {"decoder.layers.weight": STACKED, "norm": torch.randn(7).bfloat16()}
    checkpoint.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved"


def changed(place, change):
    """Writes the index again as `change` leaves it."""
    index = pickle.loads((place / ".metadata").read_bytes())
    change(index)
    (place / ".metadata").write_bytes(pickle.dumps(index))


def test_an_entry_of_a_chunk_of_many_is_read_alone(place):
    found = TorchDistCheckpoint(place)
    assert found.tensors["decoder.layers.weight"] == ((4, 3, 5), torch.float32)
    for layer in range(4):
        assert torch.equal(found.read("decoder.layers.weight", (layer,)), STACKED[layer])
    assert torch.equal(found.read("decoder.layers.weight"), STACKED)
    assert found.read("norm").dtype == torch.bfloat16


@pytest.mark.parametrize("times", [1, 2])
def test_chunks_that_are_not_all_of_a_tensor_once_are_refused(place, times, messages):
    def the_first_half(index):
        stored = index.state_dict_metadata["decoder.layers.weight"]
        (chunk,) = stored.chunks
        stored.chunks[:] = [dataclasses.replace(chunk, sizes=torch.Size((2, 3, 5)))] * times

    changed(place, the_first_half)
    with pytest.raises(JobFailed, match=r"layers\.weight") as error:
        TorchDistCheckpoint(place).read("decoder.layers.weight")
    messages(error.value)


def without_sizes(stored):
    del stored.chunks[0].__dict__["sizes"]


def with_an_offset_more(stored):
    stored.chunks[0] = dataclasses.replace(stored.chunks[0], offsets=torch.Size((0, 0, 0, 0)))


def with_an_offset_before_the_tensor(stored):
    stored.chunks[0] = dataclasses.replace(stored.chunks[0], offsets=(-1, 0, 0))


def with_a_size_in_words(stored):
    stored.chunks[0] = dataclasses.replace(stored.chunks[0], sizes=("4", 3, 5))


def with_a_size_in_parts(stored):
    stored.chunks[0] = dataclasses.replace(stored.chunks[0], sizes=(4, 2.5, 6))


def without_chunks(stored):
    stored.chunks = None


def without_a_kind_of_numbers(stored):
    stored.properties.dtype = "float32"


@pytest.mark.parametrize(
    "damage",
    [
        without_sizes,
        with_an_offset_more,
        with_an_offset_before_the_tensor,
        with_a_size_in_words,
        with_a_size_in_parts,
        without_chunks,
        without_a_kind_of_numbers,
    ],
)
def test_an_index_that_describes_no_tensor_is_refused_when_it_is_read(place, damage):
    changed(place, lambda index: damage(index.state_dict_metadata["decoder.layers.weight"]))
    with pytest.raises(UsageError, match=r"\.metadata: "):
        TorchDistCheckpoint(place)


def test_an_index_whose_keys_are_no_names_is_refused(place):
    def in_bytes(index):
        of = index.state_dict_metadata
        of[b"norm"] = of.pop("norm")

    changed(place, in_bytes)
    with pytest.raises(UsageError, match=r"\.metadata: "):
        TorchDistCheckpoint(place)


@pytest.mark.parametrize("name", ["/etc/passwd", "../other", "gone.distcp"])
def test_files_that_are_not_in_the_directory_are_not_opened(place, name, messages):
    def elsewhere(index):
        for info in index.storage_data.values():
            info.relative_path = name

    changed(place, elsewhere)
    with pytest.raises(UsageError) as error:
        TorchDistCheckpoint(place)
    assert set(error.value.violations) == {name}
    messages(error.value)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_what_is_written_is_read_by_torch_and_had_no_checksums(tmp_path, sums, fails):
    """torch.load compares none; what others of this process save afterwards is as they asked for it."""
    values, while_written = torch.randn(2, 3, 5), []

    def of(entry):
        while_written.append(torch.serialization.get_crc32_options())
        if fails:
            raise JobFailed("gone")
        return values[entry]

    parts = [
        StackedTensorSlice("a", (i,), (2,), (3, 5), torch.float32, functools.partial(of, i)) for i in range(2)
    ]
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(sums)
    try:
        with pytest.raises(JobFailed, match="gone") if fails else contextlib.nullcontext():
            write(tmp_path, parts, ["nothing"], arguments={}, content_metadata={})
        assert torch.serialization.get_crc32_options() is sums
    finally:
        torch.serialization.set_crc32_options(before)
    assert while_written == [False] * (1 if fails else 2)
    if not fails:
        found = {"a": torch.empty(2, 3, 5)}
        checkpoint.load(found, checkpoint_id=tmp_path, no_dist=True)
        assert torch.equal(found["a"], values)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_bytes_overwritten_or_cut_off(place, data):
    """In the index or in the file of values: what was written, other values, or an error of ours."""
    file = place / data.draw(st.sampled_from([".metadata", "__0_0.distcp"]))
    content = file.read_bytes()
    at = data.draw(st.integers(0, len(content)))
    odd, cut = data.draw(st.binary(min_size=1, max_size=8)), data.draw(st.integers(0, 40))
    mutated = content[:at] + odd + content[at + len(odd) :]
    file.write_bytes(mutated[: len(mutated) - cut])
    try:
        found = TorchDistCheckpoint(place)
        for key in found.tensors:
            found.read(key)
    except BundleError as error:
        assert str(place) in str(error)
    finally:
        file.write_bytes(content)
