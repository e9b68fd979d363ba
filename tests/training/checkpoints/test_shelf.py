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
    for step in (100, 200, 300, 1000):
        write(shelf, step)
    assert shelf.steps() == [1000, 300]
    assert (shelf.root / "latest").read_text() == "step-00001000\n"
    assert sorted(p.name for p in shelf.root.iterdir()) == ["latest", "step-00000300", "step-00001000"]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_after_a_fall_back_the_checkpoint_just_written_stays(shelf, keep):
    for step in (10, 20, 30):
        write(shelf, step, keep=9)
    assert shelf.go_back_to(10) == ["damaged-step-00000030", "damaged-step-00000020"]
    assert (shelf.root / "latest").read_text() == "step-00000010\n"
    write(shelf, 12, keep)
    assert shelf.steps() == [12, 10][:keep]
    assert (shelf.root / "latest").read_text() == "step-00000012\n"
    assert (shelf.root / "damaged-step-00000030" / "weights").read_text() == "30"


def test_a_checkpoint_that_is_damaged_again_takes_the_place_of_the_one_before(shelf):
    for attempt in (1, 2):
        for step in (10, 20):
            write(shelf, step)
        (shelf.place(20) / "weights").write_text(f"damaged {attempt}")
        assert shelf.go_back_to(10) == ["damaged-step-00000020"]
    assert (shelf.root / "damaged-step-00000020" / "weights").read_text() == "damaged 2"
    assert shelf.go_back_to(10) == []


def test_a_newer_checkpoint_never_costs_the_one_just_published(shelf):
    write(shelf, 20)
    write(shelf, 12, keep=1)
    assert shelf.steps() == [20, 12]


def test_emptying_removes_what_is_ours_through_a_link_and_nothing_else(shelf, tmp_path):
    elsewhere = tmp_path / "disk"
    elsewhere.mkdir()
    shelf.root.symlink_to(elsewhere)
    for step in (10, 20, 30):
        write(shelf, step)
    shelf.go_back_to(20)
    for left in (shelf.partial(40).name, ".deleting-step-00000005", ".deleting-damaged-step-00000006"):
        (elsewhere / left).mkdir()
    (elsewhere / ".latest.4711").write_text("half")
    strangers = ["20261122", ".latest", "damaged-00000030", "important.bin", "latest.1", "step-of-mine"]
    for name in strangers:
        (elsewhere / name).write_text("three weeks")
    shelf.empty()
    assert sorted(path.name for path in elsewhere.iterdir()) == sorted(strangers)
    assert shelf.root.is_symlink()


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


def test_a_checkpoint_moved_to_another_disk_is_let_go_and_not_removed(shelf, tmp_path):
    write(shelf, 100)
    elsewhere = tmp_path / "other"
    shelf.place(100).rename(elsewhere)
    shelf.place(100).symlink_to(elsewhere)
    write(shelf, 200, keep=1)
    assert shelf.steps() == [200]
    assert (elsewhere / "weights").read_text() == "100"
