"""The digest of the inputs: it changes with each of them, and with nothing else."""

import os

import pytest

from bundle.errors import UsageError
from tests.tools.images.checkouts import change, copied
from tools.images import definition
from tools.images.definition import chosen, targets
from tools.images.identity import files, fingerprint


@pytest.fixture
def root(tmp_path):
    return copied(tmp_path / "copy")


def digests(root):
    images = definition.load(root)
    return {target.name: fingerprint(root, images, target) for target in targets(images)}


def changed(root, before):
    return {name for name, digest in digests(root).items() if digest != before[name]}


def test_images_differ(root):
    found = digests(root)
    assert len(set(found.values())) == len(found)


def test_neither_times_nor_modes_nor_the_place_matter(root):
    before = digests(root)
    moved = root.rename(root.parent / "elsewhere")
    os.utime(moved / "LICENSE", (1, 1))
    (moved / "LICENSE").chmod(0o600)
    (moved / "bundle/__pycache__").mkdir()
    (moved / "bundle/__pycache__/errors.cpython-311.pyc").write_bytes(b"compiled")
    assert digests(moved) == before


def test_a_version_changes_its_own_stack_only(root):
    before = digests(root)
    change(root, "STACKS", "ascend", "pins", "torch-npu", "version", value="2.10.0.post9")
    assert changed(root, before) == {"ascend-a2", "ascend-a3"}


def test_a_base_changes_what_is_built_on_it(root):
    before = digests(root)
    change(root, "BASES", "nvcc", "digest", value="sha256:" + "0" * 64)
    assert changed(root, before) == {"cuda-mcore0-16", "cuda-mcore0-19"}


def test_a_source_changes_its_stack(root):
    before = digests(root)
    change(root, "SOURCES", "mindspeed-core-r0.15.3", "commit", value="0" * 40)
    assert changed(root, before) == {"ascend-a2-mcore0-15", "ascend-a3-mcore0-15"}


@pytest.mark.parametrize(
    "name", ["bundle/errors.py", "tools/images/identity.py", "pyproject.toml", "docker-bake.hcl"]
)
def test_what_all_have_changes_all(root, name):
    before = digests(root)
    (root / name).write_text((root / name).read_text() + "\n")
    assert changed(root, before) == set(before)


def test_every_input_of_an_image_changes_it(root):
    target = chosen(definition.load(root), ["cuda-mcore0-16"])[0]
    for file in files(root, target):
        before = digests(root)[target.name]
        file.write_bytes(file.read_bytes() + b"\n")
        assert digests(root)[target.name] != before, file


def test_an_input_that_cannot_be_read_is_named(root):
    os.truncate(root / "images/locks/cpu.txt", 65 << 20)
    with pytest.raises(UsageError, match=r"cpu\.txt"):
        digests(root)
