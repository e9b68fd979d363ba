"""Fixtures that several rooms' tests share."""

import os
from pathlib import Path

import pytest
from packaging.version import Version


@pytest.fixture(scope="session")
def release_trees() -> dict[str, Path]:
    """Unpacked megatron-core releases by version, oldest first: the directories under $BUNDLE_RELEASES."""
    directory = os.environ.get("BUNDLE_RELEASES")
    if not directory:
        pytest.skip("BUNDLE_RELEASES names no directory of unpacked megatron-core releases")
    trees = {path.name: path for path in Path(directory).iterdir() if (path / "megatron/core").is_dir()}
    return {version: trees[version] for version in sorted(trees, key=Version)}
