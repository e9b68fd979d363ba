"""Every checkpoint that has its name after the power failed is whole, and a published one is there."""

import hashlib
import json
from pathlib import Path

import pytest

from bundle.training.checkpoints import manifest
from bundle.training.checkpoints.shelf import Shelf
from tests.training.checkpoints.power import Disk, Tree


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


def write(shelf: Shelf, step: int, keep: int) -> None:
    partial = shelf.start(step)
    (partial / "megatron").mkdir()
    for name in ("state.json", "megatron/weights"):
        (partial / name).write_bytes(content(step, name))
    digests = {name: manifest.digest(partial / name, sync=True) for name in manifest.files(partial)}
    manifest.write(partial, digests)
    shelf.publish(step, keep)


def test_whatever_is_lost_no_checkpoint_is_half_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shelf = Shelf(tmp_path / "checkpoints")
    shelf.root.mkdir()
    disk = Disk(shelf.root, good)
    disk.watch(monkeypatch)
    for step in (1, 2, 3):
        write(shelf, step, keep=2)
        after = disk.synced()
        whole(after[f"step-{step:08d}"])
        assert after["latest"] == f"step-{step:08d}\n".encode()
    assert {name for name in after if name.startswith("step-")} >= {"step-00000002", "step-00000003"}
