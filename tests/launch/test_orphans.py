"""What becomes of processes when the one that forked them ends."""

import os
import signal
import subprocess
import sys
import time

from tests.launch.launched import ROOT, alive, gone

BEGIN = """
import os, sys, threading, time
from bundle.launch import orphans
"""
FROM_MAIN = """
orphans.bind_forks_to_parent_death()
if not os.fork():
    if forked := os.fork():
        print(os.getpid(), forked, flush=True)
    time.sleep(600)
sys.stdin.read()
"""
FROM_A_THREAD = """
orphans.bind_forks_to_parent_death()
def fork():
    if not (child := os.fork()):
        time.sleep(600)
    print(child, flush=True)
thread = threading.Thread(target=fork)
thread.start()
thread.join()
print("joined", flush=True)
sys.stdin.read()
"""
TOO_LATE = """
def wait():
    print(os.getpid(), flush=True)
    while os.getppid() == parent:
        time.sleep(0.01)
parent = os.getpid()
os.register_at_fork(after_in_child=wait)
orphans.bind_forks_to_parent_death()
if not os.fork():
    time.sleep(600)
sys.stdin.read()
"""

AGENT = """
import os, subprocess, sys
from pathlib import Path
folder = Path("outcomes")
folder.mkdir()
(folder / "agent.pid").write_text(str(os.getpid()))
ours = {"TORCHELASTIC_RUN_ID": "ranks", "BUNDLE_OUTCOMES": str(folder), "PYTHONPATH": sys.argv[1]}
command = [sys.executable, "-m", "bundle", "train", "demo"]
print(subprocess.Popen(command, env=os.environ | ours).pid, flush=True)
sys.stdin.read()
"""


def begun(script: str) -> tuple[subprocess.Popen, list[int]]:
    """A process, and those that it says it has forked."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", BEGIN + script]
    process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout
    return process, [int(word) for word in process.stdout.readline().split()]


def killed(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream
        stream.close()


def test_forks_and_what_they_fork_end_with_a_process_that_is_killed_even_stopped_ones():
    process, forks = begun(FROM_MAIN)
    assert len(forks) == 2 and all(map(alive, forks))
    os.kill(forks[0], signal.SIGSTOP)
    killed(process)
    assert gone(forks)


def test_what_a_thread_forked_outlives_the_thread():
    process, (fork,) = begun(FROM_A_THREAD)
    assert process.stdout
    try:
        assert process.stdout.readline() == "joined\n"
        assert not gone([fork], 0.5)
    finally:
        killed(process)
        os.kill(fork, signal.SIGKILL)


def test_a_fork_whose_parent_ended_before_it_could_ask_for_the_signal_ends_too():
    process, forks = begun(TOO_LATE)
    killed(process)
    assert gone(forks)


def test_a_rank_that_still_imports_ends_with_its_agent(tmp_path):
    module = "import pathlib, time\npathlib.Path('imports').touch()\ntime.sleep(60)\n"
    (tmp_path / "packaging.py").write_text(module)  # found before the real one, which `train` imports
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", AGENT, str(ROOT)]
    agent = subprocess.Popen(command, cwd=tmp_path, stdin=pipe, stdout=pipe, text=True)
    assert agent.stdout
    rank, deadline = int(agent.stdout.readline()), time.monotonic() + 60
    while not (tmp_path / "imports").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert alive(rank)
    killed(agent)
    assert gone([rank])
