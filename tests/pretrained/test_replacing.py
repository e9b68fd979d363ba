"""A written directory is whole or not there; what is read, and what others wrote, is not replaced."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bundle.errors import UsageError
from bundle.pretrained.replacing import (
    MANIFEST_FILE_NAME,
    refuse_overlap_and_foreign_files,
    replace_directory,
)

ROOT = Path(__file__).parents[2]


def put(place: Path, text: str) -> None:
    with replace_directory(place) as partial:
        (partial / "whole").write_text(text)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def held(place: Path) -> dict[str, str]:
    """What a person finds there."""
    return {path.name: path.read_text() for path in place.iterdir() if path.name != MANIFEST_FILE_NAME}


_KILLED = """
import os, sys
from pathlib import Path
from bundle.pretrained.replacing import replace_directory
with replace_directory(Path(sys.argv[1])) as partial:
    (partial / "half").write_text("a")
    os.kill(os.getpid(), 9)
"""


def test_whoever_is_killed_leaves_what_was_there(tmp_path):
    place = tmp_path / "hf"
    put(place, "old")
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(place)], cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL
    assert held(place) == {"whole": "old"}
    with pytest.raises(ZeroDivisionError), replace_directory(place) as partial:
        assert not list(partial.iterdir()), "what the killed one left is gone"
        (partial / "half").write_text("b")
        raise ZeroDivisionError
    assert held(place) == {"whole": "old"}
    assert names(tmp_path) == ["hf"], "nothing half written stays"
    place.rename(tmp_path / ".hf.before")  # killed between the two renames
    with pytest.raises(ZeroDivisionError), replace_directory(place):
        raise ZeroDivisionError
    assert held(place) == {"whole": "old"}
    put(place, "new")
    assert held(place) == {"whole": "new"}
    assert names(tmp_path) == ["hf"]


def test_an_interruption_between_the_two_renames_leaves_what_was_there(tmp_path, monkeypatch):
    place = tmp_path / "hf"
    put(place, "old")
    rename = Path.rename

    def interrupted(path: Path, to: Path) -> Path:
        if path.name == ".hf.partial":
            raise KeyboardInterrupt
        return rename(path, to)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            put(place, "new")
    assert held(place) == {"whole": "old"}
    assert names(tmp_path) == ["hf"]


def test_of_a_link_what_it_names_is_replaced(tmp_path):
    """As on a large disk, beside which the new one is written; the link stays what it was."""
    (tmp_path / "big").mkdir()
    link = tmp_path / "hf"
    link.symlink_to("big/hf")
    for text in ("first", "second", "third"):
        put(link, text)
        assert link.is_symlink() and link.readlink() == Path("big/hf")
        assert held(tmp_path / "big" / "hf") == {"whole": text}
        assert names(tmp_path) == ["big", "hf"] and names(tmp_path / "big") == ["hf"]


def test_what_is_no_directory_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "to file").symlink_to("file")
    (tmp_path / "circle").symlink_to("circle")
    before = names(tmp_path)
    for name, why in (
        ("file", "not a directory"),
        ("to file", "not a directory"),
        ("circle", "cannot be written"),
        ("/", "a mount point"),
        ("/proc", "a mount point"),
    ):
        with pytest.raises(UsageError, match=why):
            put(tmp_path / name, "new")
        with pytest.raises(UsageError, match=why):
            refuse_overlap_and_foreign_files(tmp_path / name, [], force=True)
    assert names(tmp_path) == before and (tmp_path / "file").read_text() == "mine"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    put(Path(), "new")
    assert held(tmp_path / "here") == {"whole": "new"}


def test_what_is_read_is_never_replaced(tmp_path, messages):
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (tmp_path / "link").symlink_to("runs/mine")
    for out in (run, run.parent, tmp_path, run / "hf", tmp_path / "link", run / ".." / "mine"):
        for force in (False, True):
            with pytest.raises(UsageError, match=re.escape(str(tmp_path))) as error:
                refuse_overlap_and_foreign_files(
                    out, [tmp_path / "elsewhere", tmp_path / "link"], force=force
                )
            messages(error.value)
    for out in (tmp_path / "runs" / "mine too", tmp_path / "runs" / "min"):
        refuse_overlap_and_foreign_files(out, [run], force=False)


def test_what_others_have_put_there_is_replaced_by_force_alone(tmp_path, messages):
    mine, ours = tmp_path / "mine", tmp_path / "ours"
    refuse_overlap_and_foreign_files(mine, [], force=False)
    mine.mkdir()
    refuse_overlap_and_foreign_files(mine, [], force=False)
    for _ in range(2):  # what was written here may be replaced, again and again
        with replace_directory(ours) as partial:
            (partial / "release").mkdir()
            (partial / "release" / "weights").write_text("1")
        refuse_overlap_and_foreign_files(ours, [], force=False)
    for directory, name in ((mine, "thesis.txt"), (ours, "release/thesis.txt"), (ours, ".hidden")):
        (directory / name).write_text("years")
        with pytest.raises(UsageError, match=rf"{re.escape(name)}.*--force") as error:
            refuse_overlap_and_foreign_files(directory, [], force=False)
        messages(error.value)
        refuse_overlap_and_foreign_files(directory, [], force=True)
        (directory / name).unlink()
    (ours / MANIFEST_FILE_NAME).unlink()
    with pytest.raises(UsageError, match="release/weights") as error:
        refuse_overlap_and_foreign_files(ours, [], force=False)
    messages(error.value)
