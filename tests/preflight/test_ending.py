"""Probes end with who started them, however that ends, and leave nothing that the next would meet."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bundle import preflight
from bundle.environment.hardware import build_preset
from bundle.errors import TargetUnavailable
from bundle.launch.rendezvous import discover
from tests.launch.launched import ROOT, gone, reserved

ALONE = """
from bundle.preflight import Probe, run_probes
run_probes([Probe("device 0", "tests.preflight.probe", ("sleep",), "")], 600.0)
"""
TOGETHER = """
import sys
from bundle.environment.hardware import build_preset
from bundle.launch.rendezvous import discover
from bundle.preflight import measure_links
where = discover({}, nodes=2, node_rank=0, endpoint=sys.argv[1])
measure_links(build_preset("cpu", 1), where, {}, quick=True, devices=2, wait=300)
"""


def begun(script: str, *words: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", script, *words], cwd=ROOT)


def children(process: subprocess.Popen, count: int) -> list[int]:
    """The processes that the threads of one have started, once there are so many."""
    while True:
        paths = Path(f"/proc/{process.pid}/task").glob("*/children")
        found = [int(word) for path in paths for word in path.read_text().split()]
        if len(found) == count:
            return found
        assert process.poll() is None
        time.sleep(0.005)


def listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def wait_for(happened: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_probe_ends_with_who_was_ended_before_it_could_ask_for_that():
    process = begun(ALONE)
    probes = children(process, 1)
    process.terminate()
    process.wait()
    assert gone(probes, 60)


@pytest.mark.world
def test_links_end_with_who_is_told_to_stop_and_their_port_is_free():
    pytest.importorskip("torch")
    with reserved() as port:
        process = begun(TOGETHER, f"127.0.0.1:{port}")
        probes = children(process, 2)
        wait_for(lambda: listens(port), 240)
        process.terminate()
        process.wait()
        assert gone(probes, 30)
        wait_for(lambda: not listens(port), 10)  # threads may let go of it after the process counts as ended


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_port_that_somebody_has_is_nothing_against_the_node(host, messages):
    with socket.create_server((host, 0)) as taken:
        port = taken.getsockname()[1]
        where = discover({}, nodes=2, node_rank=0, endpoint=f"127.0.0.1:{port}")
        with pytest.raises(TargetUnavailable, match=f"port {port}") as raised:
            preflight.measure_links(build_preset("cpu", 1), where, {}, quick=True, devices=1, wait=1)
    messages(str(raised.value).replace(str(port), "PORT"))
