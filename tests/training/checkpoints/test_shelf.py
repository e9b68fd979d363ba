from pathlib import Path

import pytest

from bundle.training.checkpoints import manifest
from bundle.training.checkpoints.shelf import Shelf


def write(shelf: Shelf, step: int, keep: int = 2) -> None:
    partial = shelf.start(step)
    (partial / "weights").write_text(str(step))
    manifest.write(partial, {"weights": manifest.digest(partial / "weights")})
    shelf.publish(step, keep)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "checkpoints")


def test_nothing_is_there_at_first(shelf):
    assert shelf.steps() == []


def test_the_newest_stay_and_latest_names_the_last(shelf):
    for step in (100, 200, 1000, 300):
        write(shelf, step)
    assert shelf.steps() == [1000, 300]
    assert (shelf.root / "latest").read_text() == "step-00000300\n"
    assert sorted(p.name for p in shelf.root.iterdir()) == ["latest", "step-00000300", "step-00001000"]


def test_an_interrupted_write_is_no_checkpoint_and_is_cleared_by_the_next(shelf):
    write(shelf, 100)
    (shelf.start(200) / "half").write_text("x")
    assert shelf.steps() == [100]
    write(shelf, 300)
    assert not list(shelf.root.glob(".*"))


def test_an_interrupted_removal_leaves_no_half_checkpoint(shelf, monkeypatch):
    write(shelf, 100)
    monkeypatch.setattr("shutil.rmtree", lambda path: (_ for _ in ()).throw(OSError("power")))
    with pytest.raises(OSError, match="power"):
        shelf._remove(shelf.place(100))
    assert shelf.steps() == []


def test_a_resumed_run_replaces_the_checkpoint_of_a_step(shelf):
    write(shelf, 100)
    write(shelf, 100)
    assert shelf.steps() == [100]


def test_only_what_lies_on_the_shelf_is_ours(shelf, tmp_path):
    write(shelf, 100)
    assert shelf.is_ours(shelf.place(100))
    elsewhere = tmp_path / "other"
    shelf.place(100).rename(elsewhere)
    assert not shelf.is_ours(elsewhere)
    shelf.place(100).symlink_to(elsewhere)
    assert not shelf.is_ours(shelf.place(100))
