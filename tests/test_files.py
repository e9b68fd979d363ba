import errno
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bundle import files
from bundle.errors import JobFailed

ROOT = Path(__file__).parents[1]


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "state.json"
    files.write_json(path, {"a": 0.1})
    files.write_json(path, {"a": 0.1 + 0.2})
    assert '"a": 0.30000000000000004' in path.read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize(
    ("umask", "mode"), [(0, (0o640, 0o750)), (0o022, (0o640, 0o750)), (0o077, (0o600, 0o700))]
)
def test_others_have_no_rights_to_new_files_and_a_narrower_umask_stays(tmp_path, umask, mode):
    earlier = os.umask(umask)
    try:
        files.restrict_umask_to_group_read()
        files.write_text(tmp_path / "file", "")
        (tmp_path / "folder").mkdir()
    finally:
        os.umask(earlier)
    assert tuple((tmp_path / name).stat().st_mode & 0o777 for name in ("file", "folder")) == mode


def test_who_writes_a_file_at_the_same_time_as_others_writes_a_whole_one(tmp_path, monkeypatch):
    path, sync, both = tmp_path / "state.json", os.fsync, threading.Barrier(2, timeout=30)
    met = threading.local()

    def meet(descriptor):
        sync(descriptor)
        if not hasattr(met, "before"):  # with the file, not with its directory
            met.before = both.wait()

    monkeypatch.setattr(os, "fsync", meet)
    texts = ["a" * 100_000, "b" * 200_000]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda text: files.write_text(path, text), texts))
    assert path.read_text() in texts
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


WRITE = """
import sys
from pathlib import Path
from bundle.errors import JobFailed
from bundle import files
try:
    files.write_text(Path(sys.argv[1]), "x" * 10000)
except JobFailed as error:
    print(error)
"""


def limited() -> None:
    """A disk that is full after 4 KiB: the kernel refuses more to this process."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def test_a_full_disk_is_one_clear_error_and_the_old_file_stays(tmp_path, messages):
    path = tmp_path / "metrics.json"
    path.write_text("old")
    command = [sys.executable, "-c", WRITE, str(path)]
    done = subprocess.run(command, cwd=ROOT, preexec_fn=limited, capture_output=True, text=True, timeout=60)
    assert f"{path}: " in done.stdout and "checkpoint.keep" in done.stdout
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.json"]
    messages(re.sub(r"[\d.]+ [KMGT]iB", "SIZE", done.stdout))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_what_a_full_disk_is(number):
    assert files.is_disk_full(OSError(number, "x"))
    assert files.is_disk_full(RuntimeError(f"a writer failed: {os.strerror(number)}"))
    assert not files.is_disk_full(OSError(errno.EACCES, "x"))


def test_other_errors_keep_their_words(tmp_path, messages):
    with pytest.raises(JobFailed, match=os.strerror(errno.ENOENT)) as error:
        files.write_text(tmp_path / "missing" / "x", "")
    messages(str(error.value).partition(" [Errno")[0])
