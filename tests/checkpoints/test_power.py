"""Every checkpoint that has its name after the power failed is whole, and a published one is there."""

import hashlib
import json
from pathlib import Path

import pytest

from bundle.checkpoints import manifest
from bundle.checkpoints.directory import CheckpointDirectory
from tests.checkpoints.power import Disk, Tree


def content(step: int, name: str) -> bytes:
    return f"{step} {name}".encode() * 100


def whole(checkpoint: Tree) -> None:
    listed = json.loads(checkpoint["manifest.json"])["sha256"]
    files = {"state.json": checkpoint["state.json"], "megatron/weights": checkpoint["megatron"]["weights"]}
    assert {name: hashlib.sha256(bytes_).hexdigest() for name, bytes_ in files.items()} == listed


def good(root: Tree) -> None:
    """Complete checkpoints only, and `latest` names one of those that were there at some time."""
    for name, checkpoint in root.items():
        if name.startswith("step-"):
            whole(checkpoint)
    if "latest" in root:
        assert root["latest"].startswith(b"step-0000000")


def write(kept: CheckpointDirectory, step: int, keep: int) -> None:
    partial = kept.create_sole_partial(step)
    (partial / "megatron").mkdir()
    for name in ("state.json", "megatron/weights"):
        (partial / name).write_bytes(content(step, name))
    digests = {
        name: manifest.compute_digest(partial / name, sync=True) for name in manifest.list_file_names(partial)
    }
    manifest.write(partial, digests)
    kept.publish(step, keep)


def test_whatever_is_lost_no_checkpoint_is_half_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kept = CheckpointDirectory(tmp_path / "checkpoints")
    kept.root.mkdir()
    disk = Disk(kept.root, good)
    disk.watch(monkeypatch)
    for step in (1, 2, 3):
        write(kept, step, keep=2)
        after = disk.synced()
        whole(after[f"step-{step:08d}"])
        assert after["latest"] == f"step-{step:08d}\n".encode()
    assert {name for name in after if name.startswith("step-")} >= {"step-00000002", "step-00000003"}
