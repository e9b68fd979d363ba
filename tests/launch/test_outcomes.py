import os

from bundle.errors import ExitCode
from bundle.launch import outcomes as noted


def test_a_rank_that_cannot_write_how_it_ended_says_so_and_why_it_ended(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(noted.LAUNCH_FOLDER_VARIABLE, str(tmp_path / "gone"))
    noted.report_end(3, 1, ExitCode.JOB_FAILED, "shard 3 is corrupt")
    said = capsys.readouterr().err
    failure, end = said.splitlines()
    assert f"{tmp_path}/gone" in failure and "shard 3" in end


def test_a_rank_puts_down_its_outcome_whole(tmp_path, monkeypatch):
    monkeypatch.setenv(noted.LAUNCH_FOLDER_VARIABLE, str(tmp_path))
    noted.report_end(3, 1, ExitCode.PATCHES, "patch x")
    (found,) = noted.read(tmp_path)
    assert (found.rank, found.pid, found.code, found.message) == (3, os.getpid(), 4, "patch x")
    assert [path.name for path in tmp_path.iterdir()] == ["rank-3.json"]
