"""Real faults of the file system below a launch, the verdict on each, and where the evidence is kept."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bundle.launch import outcomes, storage, verdict
from tests.launch.disks import create_disk, mount_disk, shut_down, turn_read_only, unmount
from tests.launch.launched import ROOT, finish, gone, start, wait_until_ready

HAS_NAMESPACES = os.geteuid() == 0 and shutil.which("unshare") is not None
WORKER = "tests.launch.worker"


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return create_disk(tmp_path, 16 << 20)


@pytest.mark.skipif(not HAS_NAMESPACES, reason="needs root, and unshare")
@pytest.mark.world
@pytest.mark.parametrize(
    ("fail", "place", "text", "rank", "action"),
    [
        pytest.param(turn_read_only, "disk/run/state", "Read-only file system", 0, "stop"),
        pytest.param(unmount, "disk", "mounted", None, "stop", marks=pytest.mark.slow),
        pytest.param(shut_down, "disk/run/state", "Input/output error", 0, "restart", marks=pytest.mark.slow),
    ],
    ids=["read-only", "unmounted", "shut down"],
)
def test_a_file_system_that_fails_is_named_and_the_evidence_is_kept_elsewhere(
    tmp_path: Path,
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    fail: Callable[[int, Path], None],
    place: str,
    text: str,
    rank: int | None,
    action: str,
) -> None:
    local = tmp_path / "local"
    local.mkdir()
    monkeypatch.setenv("TMPDIR", str(local))
    # Its launcher kills a rank that does not end, whose process it cannot read from this disk any more.
    arguments = ("write", str(disk / "run"), *(["stubborn"] if fail is unmount else []))
    launched = start(tmp_path, WORKER, *arguments, logs="disk/run/logs", within=mount_disk(disk))
    pids = wait_until_ready(tmp_path, Path(f"/proc/{launched.pid}/root", *disk.parts[1:], "run/logs"))
    assert len(pids) == 2
    time.sleep(1)  # its launcher has seen both ranks by then
    with (tmp_path / "writing").open("w") as lock:  # a write during the failure may have another error
        fcntl.flock(lock, fcntl.LOCK_EX)
        fail(launched.pid, disk)
    began = time.monotonic()
    _, err = finish(launched, 1)
    assert time.monotonic() - began < 12  # it gives ranks 5 s to end, and an agent without ranks 8 s more
    (kept,) = local.glob(f"*/{verdict.FILE_NAME}")
    values: dict[str, Any] = json.loads(kept.read_text())
    assert err.splitlines()[-1] == values["sentence"] and str(kept) in err
    assert (values["kind"], values["action"], values["code"]) == ("disk", action, 1)
    assert values["cause"].startswith(f"{tmp_path / place}: ") and text in values["cause"]
    assert values["rank"] == rank and values["evidence"][0].startswith("rank 0: ")
    assert kept.parent.stat().st_mode & 0o777 == 0o700
    assert gone(pids)


def test_a_log_folder_that_is_removed_is_no_file_system_that_is_gone(tmp_path, messages):
    folder = tmp_path / "logs"
    folder.mkdir()
    log_storage = storage.LogFileSystem(folder)
    assert log_storage.find_write_failure() == "" and not list(folder.iterdir())
    folder.rmdir()
    messages(log_storage.find_write_failure())
    assert str(folder) in log_storage.find_write_failure() and "mount" not in log_storage.find_write_failure()


@pytest.mark.skipif(not HAS_NAMESPACES, reason="needs root, and unshare")
@pytest.mark.processes
def test_a_file_system_without_inodes_is_told_from_one_without_room(tmp_path):
    (tmp_path / "disk").mkdir()
    program = (
        "import sys; from pathlib import Path; from bundle import files; folder = Path(sys.argv[1])\n"
        "for number in range(100):\n"
        "    files.write_text(folder / str(number), 'x')"
    )
    errors = []
    for option in ("nr_inodes=20", "size=64k"):
        script = f'mount -t tmpfs -o {option} none "$0"; exec "$@"'
        command = ["unshare", "--mount", "sh", "-ec", script, str(tmp_path / "disk"), sys.executable, "-c"]
        ended = subprocess.run(
            [*command, program, str(tmp_path / "disk")],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
        errors.append(ended.stderr.splitlines()[-1])
    assert "inodes" in errors[0] and "20" in errors[0] and "free" in errors[0]
    assert "inodes" not in errors[1] and "0 B free" in errors[1]


def test_an_outcome_is_read_from_the_disk_that_could_be_written_last(tmp_path):
    folder, local = tmp_path / "logs", tmp_path / "local"
    folder.mkdir()
    alive, broken = (outcomes.RankState(3, 1, 4711, 1.0, code) for code in (None, 1))
    outcomes.write_on_any_disk("rank-3.json", alive.__dict__, folder, local)
    assert outcomes.read(folder, local) == [alive] and not local.exists()
    outcomes.write_on_any_disk("rank-3.json", broken.__dict__, tmp_path / "none", local)
    assert outcomes.read(folder, local) == [broken] and outcomes.read(folder) == [alive]


def test_an_outcome_is_written_where_the_log_of_the_rank_cannot_be(tmp_path, monkeypatch):
    def fail() -> None:
        raise ValueError("corrupt shard 3")

    monkeypatch.setenv(outcomes.LAUNCH_FOLDER_VARIABLE, str(tmp_path))
    earlier = signal.getsignal(signal.SIGTERM)
    with suppress(OSError), Path("/dev/full").open("w", buffering=1) as log:  # closing it fails as well
        monkeypatch.setattr(sys, "stderr", log)
        code = outcomes.run_and_report(3, 1, fail)
    assert code == 1
    signal.signal(signal.SIGTERM, earlier)
    (outcome,) = outcomes.read(tmp_path)
    assert (outcome.code, outcome.message) == (1, "ValueError: corrupt shard 3")
