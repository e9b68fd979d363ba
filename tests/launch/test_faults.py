"""Real faults of real processes, and the verdict on each."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bundle.launch import outcomes
from bundle.launch.causes import PORT_IN_USE_ADVICE
from tests.launch.launched import ROOT, finish, gone, read_verdict, reserved, start

WORKER = "tests.launch.worker"
SECONDS = 300  # for a start on a busy machine
HAS_NAMESPACES = os.geteuid() == 0 and shutil.which("unshare") is not None
pytestmark = pytest.mark.world


def node(monkeypatch: pytest.MonkeyPatch, rank: int, host: str, port: int, wait: int = 600) -> None:
    """The variables of one node of two."""
    said = {"NNODES": "2", "MASTER_ADDR": host, "MASTER_PORT": str(port), "NODE_RANK": str(rank)}
    for name, value in said.items():
        monkeypatch.setenv(f"PET_{name}", value)
    monkeypatch.setenv("SLURMD_NODENAME", f"node{rank}")
    monkeypatch.setenv("TEST_WAIT", str(wait))


def check_verdict(folder: Path, err: str, **expected: object) -> str:
    """Return the cause in the verdict of a launch, which has these values and is the last line of `err`."""
    verdict = read_verdict(folder)
    assert err.splitlines()[-1] == verdict["sentence"]
    assert {key: verdict[key] for key in expected} == expected
    return str(verdict["cause"])


def limit_memory(group: Path, size: int) -> None:
    """Set the most memory of a group of processes [bytes]."""
    second = (group / "memory.max").exists()
    (group / ("memory.max" if second else "memory.limit_in_bytes")).write_text(str(size))


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A group of processes that may have 200 MiB of memory, of the first or second kind of groups."""
    name, second = f"mcore-bundle-test-{os.getpid()}", Path("/sys/fs/cgroup/cgroup.controllers").exists()
    group = Path("/sys/fs/cgroup", "" if second else "memory", name)
    try:
        group.mkdir()
        limit_memory(group, 200 << 20)
    except OSError as error:
        pytest.skip(f"no group of processes can be made: {error}")
    try:
        yield group
    finally:
        group.rmdir()


def test_a_rank_that_the_kernel_kills_for_want_of_memory(tmp_path, monkeypatch, cgroup):
    monkeypatch.setenv("TEST_CGROUP", str(cgroup))
    _, err = finish(start(tmp_path, WORKER, "grow"), 1, SECONDS)
    check_verdict(tmp_path, err, kind="host memory", rank=1, action="restart")
    assert gone([outcome.pid for outcome in outcomes.read(tmp_path / "logs")])


# Every Python of a launch runs it. Only torchrun takes ever more memory, once `ready` files are there.
_GREEDY_AGENT = """\
import sys
if "torch.distributed.run" in sys.orig_argv:
    import glob, threading, time
    def grow():
        while len(glob.glob("ready-*")) < {ready}:
            time.sleep(0.05)
        taken = []
        while True:
            taken.append(b"x" * (1 << 24))
    threading.Thread(target=grow, daemon=True).start()
"""


@pytest.mark.skipif(not HAS_NAMESPACES, reason="needs root, and unshare")
@pytest.mark.parametrize(
    ("ready", "hidden"),
    [(2, ()), (0, ("/dev/kmsg", "/proc/vmstat"))],
    ids=["the kernel's log names it", "before its ranks, and only the group counts it"],
)
def test_an_agent_that_the_kernel_kills_for_want_of_memory(tmp_path, monkeypatch, cgroup, ready, hidden):
    limit_memory(cgroup, 600 << 20)
    (tmp_path / "sitecustomize.py").write_text(_GREEDY_AGENT.format(ready=ready))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    script = "".join(f"mount --bind /dev/null {path}; " for path in hidden)
    script += f'echo $$ >{cgroup}/cgroup.procs; exec "$@"'
    launched = start(tmp_path, WORKER, "sleep", within=("unshare", "--mount", "sh", "-ec", script, "sh"))
    _, err = finish(launched, 1, SECONDS)
    cause = check_verdict(tmp_path, err, kind="host memory", rank=None, action="restart")
    pid = (tmp_path / "logs" / outcomes.AGENT_PID_FILE).read_text()
    assert f"process {pid})" in cause
    (evidence,) = read_verdict(tmp_path)["evidence"]
    assert ("SIGKILL" in evidence) if hidden else (f"Killed process {pid} " in evidence)
    ranks = outcomes.read(tmp_path / "logs")
    assert len(ranks) == ready and gone([outcome.pid for outcome in ranks])


def test_a_rank_that_may_have_no_more_memory(tmp_path):
    _, err = finish(start(tmp_path, WORKER, "grow"), 1, SECONDS)
    check_verdict(tmp_path, err, kind="host memory", rank=1, action="stop")


def test_the_port_where_nodes_meet_is_taken(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        node(monkeypatch, 0, "127.0.0.1", taken.getsockname()[1], 60)
        _, err = finish(start(tmp_path, WORKER, "well"), 5, SECONDS)
    cause = check_verdict(tmp_path, err, kind="launch", node="node0", rank=None, action="stop")
    assert cause == PORT_IN_USE_ADVICE


def test_nobody_is_where_the_nodes_meet(tmp_path, monkeypatch):
    with reserved() as port:
        node(monkeypatch, 1, "127.0.0.1", port, 3)
        _, err = finish(start(tmp_path, WORKER, "well"), 5, SECONDS)
    cause = check_verdict(tmp_path, err, kind="launch", node="node1", rank=None, action="restart")
    assert f"127.0.0.1:{port}" in cause and "3 s" in cause


@pytest.mark.skipif(not HAS_NAMESPACES, reason="needs root, and unshare")
@pytest.mark.slow
def test_nodes_meet_at_a_name_that_is_known_20_seconds_late(tmp_path, monkeypatch):
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    with reserved() as port:
        started = []
        for rank in (1, 0):
            node(monkeypatch, rank, "late.example", port)
            folder = tmp_path / str(rank)
            folder.mkdir()
            # A mount namespace of its own, where /etc/hosts is another: the machine's is not touched.
            command = [
                "unshare",
                "--mount",
                "sh",
                "-ec",
                'mount --bind "$0" /etc/hosts; exec "$@"',
                str(hosts),
            ]
            started.append(
                subprocess.Popen(
                    [*command, sys.executable, "-m", "tests.launch.starter", "logs", WORKER, "well"],
                    cwd=folder,
                    env=os.environ | {"PYTHONPATH": str(ROOT)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        time.sleep(20)
        with hosts.open("a") as file:
            file.write("127.0.0.1 late.example\n")
        assert [finish(each, 0, SECONDS)[0] for each in started] == [
            "[1/2] rank 2 of 4 []\n",
            "[0/0] rank 0 of 4 []\n",
        ]
