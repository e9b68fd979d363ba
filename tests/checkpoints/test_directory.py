from pathlib import Path

import pytest

from bundle.checkpoints import manifest
from bundle.checkpoints.directory import CheckpointDirectory


def write(kept: CheckpointDirectory, step: int, keep: int = 2) -> None:
    partial = kept.create_sole_partial(step)
    (partial / "weights").write_text(str(step))
    manifest.write(partial, {"weights": manifest.compute_digest(partial / "weights")})
    kept.publish(step, keep)


@pytest.fixture
def kept(tmp_path: Path) -> CheckpointDirectory:
    return CheckpointDirectory(tmp_path / "checkpoints")


def test_nothing_is_there_at_first(kept):
    assert kept.list_steps_newest_first() == []


def test_the_newest_stay_and_latest_names_the_last(kept):
    for step in (100, 200, 300, 1000):
        write(kept, step)
    assert kept.list_steps_newest_first() == [1000, 300]
    assert (kept.root / "latest").read_text() == "step-00001000\n"
    assert sorted(p.name for p in kept.root.iterdir()) == ["latest", "step-00000300", "step-00001000"]


def test_the_best_stays_whatever_comes_after_it_and_is_named(kept):
    for step, best in ((10, None), (20, 20), (30, 20), (40, 40), (50, 40), (60, 40)):
        partial = kept.create_sole_partial(step)
        manifest.write(partial, {})
        kept.publish(step, 1, best)
    assert kept.list_steps_newest_first() == [60, 40]
    assert (kept.root / "best").read_text() == "step-00000040\n"
    kept.remove_all()
    assert not [*kept.root.iterdir()]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_after_a_fall_back_the_checkpoint_just_written_stays(kept, keep):
    for step in (10, 20, 30):
        write(kept, step, keep=9)
    assert kept.mark_newer_damaged(10) == ["damaged-step-00000030", "damaged-step-00000020"]
    assert (kept.root / "latest").read_text() == "step-00000010\n"
    write(kept, 12, keep)
    assert kept.list_steps_newest_first() == [12, 10][:keep]
    assert (kept.root / "latest").read_text() == "step-00000012\n"
    assert (kept.root / "damaged-step-00000030" / "weights").read_text() == "30"


def test_a_checkpoint_that_is_damaged_again_takes_the_place_of_the_one_before(kept):
    for attempt in (1, 2):
        for step in (10, 20):
            write(kept, step)
        (kept.get_path(20) / "weights").write_text(f"damaged {attempt}")
        assert kept.mark_newer_damaged(10) == ["damaged-step-00000020"]
    assert (kept.root / "damaged-step-00000020" / "weights").read_text() == "damaged 2"
    assert kept.mark_newer_damaged(10) == []


def test_a_newer_checkpoint_never_costs_the_one_just_published(kept):
    write(kept, 20)
    write(kept, 12, keep=1)
    assert kept.list_steps_newest_first() == [20, 12]


def test_emptying_removes_what_is_ours_through_a_link_and_nothing_else(kept, tmp_path):
    elsewhere = tmp_path / "disk"
    elsewhere.mkdir()
    kept.root.symlink_to(elsewhere)
    for step in (10, 20, 30):
        write(kept, step)
    kept.mark_newer_damaged(20)
    for left in (
        kept.get_partial_path(40).name,
        ".deleting-step-00000005",
        ".deleting-damaged-step-00000006",
    ):
        (elsewhere / left).mkdir()
    (elsewhere / ".latest.4711").write_text("half")
    strangers = ["20261122", ".latest", "damaged-00000030", "important.bin", "latest.1", "step-of-mine"]
    for name in strangers:
        (elsewhere / name).write_text("three weeks")
    kept.remove_all()
    assert sorted(path.name for path in elsewhere.iterdir()) == sorted(strangers)
    assert kept.root.is_symlink()


def test_an_interrupted_write_is_no_checkpoint_and_is_cleared_by_the_next(kept):
    write(kept, 100)
    (kept.create_sole_partial(200) / "half").write_text("x")
    assert kept.list_steps_newest_first() == [100]
    write(kept, 300)
    assert not list(kept.root.glob(".*"))


def test_an_interrupted_removal_leaves_no_half_checkpoint(kept, monkeypatch):
    write(kept, 100)
    monkeypatch.setattr("shutil.rmtree", lambda path: (_ for _ in ()).throw(OSError("power")))
    with pytest.raises(OSError, match="power"):
        kept._remove(kept.get_path(100))
    assert kept.list_steps_newest_first() == []


def test_a_resumed_run_replaces_the_checkpoint_of_a_step(kept):
    write(kept, 100)
    write(kept, 100)
    assert kept.list_steps_newest_first() == [100]


def test_a_checkpoint_moved_to_another_disk_is_let_go_and_not_removed(kept, tmp_path):
    write(kept, 100)
    elsewhere = tmp_path / "other"
    kept.get_path(100).rename(elsewhere)
    kept.get_path(100).symlink_to(elsewhere)
    write(kept, 200, keep=1)
    assert kept.list_steps_newest_first() == [200]
    assert (elsewhere / "weights").read_text() == "100"
