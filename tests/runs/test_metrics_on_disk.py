"""metrics.jsonl is on the disk before the checkpoint of its steps is."""

import errno
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.core")

from bundle.errors import JobFailed
from bundle.runs.metrics import JsonLines, MetricsDispatcher
from bundle.runs.session import Session


def test_lines_are_synced_before_a_checkpoint(tmp_path, monkeypatch):
    events: list[object] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append(os.fstat(descriptor).st_ino))
    session = Session.__new__(Session)
    session.__dict__ |= {
        "progress": SimpleNamespace(step=7, consumed_samples=28, dump=dict),
        "engine": SimpleNamespace(gather_pending_loss_sums=list),
        "identity": {},
        "task_state": {},
        "watchdog": SimpleNamespace(extend_patience=lambda _: nullcontext()),
        "checkpoints": SimpleNamespace(save=lambda state: events.append(state.step)),
    }
    path = tmp_path / "metrics.jsonl"
    with MetricsDispatcher([JsonLines(path)]) as session.metrics:
        session.metrics.write(7, {"train/loss": 1.5})
        session._save()
    assert events == [path.stat().st_ino, 7]


def test_a_disk_that_does_not_take_them_fails_the_job(tmp_path, monkeypatch):
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    lines = JsonLines(tmp_path / "metrics.jsonl")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(JobFailed, match=r"metrics\.jsonl"):
        lines.sync()
    lines.close()


def test_a_full_disk_is_named_with_the_file_by_a_line_and_by_the_end():
    lines = JsonLines(Path("/dev/full"))
    for use in (lambda: lines.write(1, {"train/loss": 1.5}), lines.close):
        with pytest.raises(JobFailed, match="/dev/full: no room left"):
            use()
