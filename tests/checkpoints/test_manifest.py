import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle.checkpoints import manifest


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__1_0.distcp").write_bytes(b"weights")
    (tmp_path / "state.json").write_text("{}")
    manifest.write(
        tmp_path,
        {name: manifest.compute_digest(tmp_path / name) for name in manifest.list_file_names(tmp_path)},
    )
    return tmp_path


def damage(directory: Path) -> list[str]:
    digests = manifest.read(directory)
    return manifest.find_defects(directory, digests, digests)


def test_what_was_written_has_no_defects(checkpoint):
    assert damage(checkpoint) == []
    assert set(manifest.read(checkpoint)) == {"megatron/__1_0.distcp", "state.json"}


def test_a_changed_a_truncated_a_missing_and_a_linked_file_are_named(checkpoint, messages):
    weights = checkpoint / "megatron" / "__1_0.distcp"
    for change in (
        lambda: weights.write_bytes(b"weightz"),
        lambda: weights.write_bytes(b"weight"),
        weights.unlink,
        lambda: weights.symlink_to("/etc/passwd"),
    ):
        change()
        (defect,) = damage(checkpoint)
        assert defect.startswith("megatron/__1_0.distcp")
        messages(defect)


def test_a_folder_that_is_a_link_is_no_part_of_a_checkpoint(checkpoint, tmp_path_factory, messages):
    elsewhere = tmp_path_factory.mktemp("other") / "megatron"
    (checkpoint / "megatron").rename(elsewhere)
    (checkpoint / "megatron").symlink_to(elsewhere)
    (defect,) = manifest.describe_unlisted_files(checkpoint, manifest.read(checkpoint))
    assert defect.startswith("megatron ")
    messages(defect)


@pytest.mark.parametrize("size", [2**22 - 1, 2**22, 2**22 + 1, 2**24 + 3])
def test_every_byte_of_a_large_file_counts(tmp_path, size):
    content = bytearray(os.urandom(size))
    path = tmp_path / "weights"
    path.write_bytes(content)
    assert manifest.compute_digest(path) == hashlib.sha256(content).hexdigest()
    content[-1] ^= 1
    path.write_bytes(content)
    assert manifest.compute_digest(path, sync=True) == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"schema": 2, "sha256": {}}',
        '{"schema": 1, "sha256": {"a": "zz"}}',
        '{"schema": 1, "sha256": {"../../etc/passwd": "' + "0" * 64 + '"}}',
        '{"schema": 1, "sha256": {"/etc/passwd": "' + "0" * 64 + '"}}',
    ],
)
def test_a_manifest_that_is_not_ours_is_refused(checkpoint, text):
    (checkpoint / manifest.FILE_NAME).write_text(text)
    with pytest.raises(ValueError, match="manifest"):
        manifest.read(checkpoint)


@given(
    st.lists(st.from_regex(r"(megatron/)?__[0-9]{1,2}_[0-9]\.distcp|[a-z]{1,8}", fullmatch=True)),
    st.integers(1, 9),
)
def test_every_file_is_read_by_exactly_one_rank(names, world_size):
    shares = [
        name
        for rank in range(world_size)
        for name in manifest.select_files_by_writer_rank(names, rank, world_size)
    ]
    assert sorted(shares) == sorted(names)


def test_a_rank_reads_what_it_wrote():
    names = ["megatron/__0_0.distcp", "megatron/__1_0.distcp", "random-00001.safetensors", "state.json"]
    assert {"megatron/__1_0.distcp", "random-00001.safetensors"} <= set(
        manifest.select_files_by_writer_rank(names, 1, 2)
    )


def test_a_file_that_nobody_listed_is_named(checkpoint, messages):
    (checkpoint / "megatron" / "common.pt").write_bytes(b"")
    (defect,) = manifest.describe_unlisted_files(checkpoint, manifest.read(checkpoint))
    assert defect.startswith("megatron/common.pt ")
    messages(defect)


def test_the_manifest_is_plain_json(checkpoint):
    found = json.loads((checkpoint / manifest.FILE_NAME).read_text())
    assert found["schema"] == 1
