"""Runs whose run directory is on a disk that fails, and that go on when it is repaired."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command import finish, start_training
from tests.faults.harness import RECIPE, SECONDS, find_processes, has_checkpoint, wait_for
from tests.launch.disks import create_disk, fill, mount_disk, turn_read_only, unmount
from tests.training.verdicts import find_resumed_steps

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root, and unshare"
    ),
]
FAULTS = {
    "the disk of the run directory is full": (fill, "0 B free"),
    "the disk of the run directory turns read-only": (turn_read_only, "Read-only file system"),
    "the disk of the run directory is unmounted": (unmount, "is not mounted"),
}
# Runs a command where the disk is mounted, and keeps what that has left there.
_KEEP = """\
code=0
"$@" || code=$?
for file in "$0/run/metrics.jsonl" "$0"/run/logs/node-0/1/verdict.json; do
    if [ -e "$file" ]; then cp "$file" "$0/.."; fi
done
exit $code
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_goes_on_when_its_disk_is_repaired(faults, whole, tmp_path, monkeypatch, fault):
    disk = create_disk(tmp_path, 64 << 20)
    (tmp_path / "local").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "local"))
    inject: Callable[..., None]
    inject, cause = FAULTS[fault]
    within = (*mount_disk(disk), "sh", "-ec", _KEEP, disk)
    process = start_training("demo", disk / "run", RECIPE, within=within)
    mounted = Path(f"/proc/{process.pid}/root", *disk.parts[1:], "run")
    wait_for(lambda: has_checkpoint(mounted), process)
    inject(process, disk)
    printed = finish(process, 1, SECONDS)
    processes = find_processes(tmp_path)
    # A launch that cannot write it to the disk writes it to the directory for temporary files.
    places = (tmp_path, *(tmp_path / "local").glob("mcore-bundle-*"))
    (file,) = (path for place in places for path in place.glob("verdict.json"))
    verdict = json.loads(file.read_text())
    assert (verdict["kind"], verdict["action"], verdict["code"]) == ("disk", "stop", 1)
    assert str(disk) in verdict["cause"] and cause in verdict["cause"] and verdict["sentence"] in printed
    script = f'fsck.ext4 -fy {tmp_path / "image"} >&2 || [ $? -le 2 ]; exec "$@"'
    repaired = (
        "sh",
        "-ec",
        script,
        "sh",
        *mount_disk(disk),
        "sh",
        "-ec",
        'rm -f "$0/filler"; exec "$@"',
        disk,
    )
    within = (*repaired, "sh", "-ec", _KEEP, disk)
    resumed = start_training("demo", disk / "run", RECIPE, within=within)
    assert find_resumed_steps(finish(resumed, timeout=SECONDS))
    faults.check(
        *("local", fault), verdict=verdict, processes=processes,
        metrics=tmp_path / "metrics.jsonl", whole=whole,
    )  # fmt: skip
