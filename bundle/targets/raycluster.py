"""A Ray cluster of the machines on which a scheduler has started us: the first one has its head, and drives.

It is of one job alone, with a token of its own, in a file beside the job's that nobody else may read, and a
dashboard on loopback. Where its head is gone, so is all of it. The words of `ray start`:
docs.ray.io/en/latest/cluster/cli.html.
"""

import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from bundle import files
from bundle.errors import ExitCode, LaunchUnavailable, UsageError
from bundle.files import json_digest
from bundle.launch.job import Job
from bundle.launch.orphans import death_signal
from bundle.launch.rendezvous import LOOPBACK, Rendezvous, own_address
from bundle.launch.starters import unstarted
from bundle.targets.ray import TOKEN, bundles, imported, started_with, why

_LOOK_SECONDS = 1.0
_END_SECONDS = 30  # that Ray's processes may take to end
_ELSEWHERE = "192.0.2.1"  # an address of nobody (RFC 5737); nothing is sent there
_SILENT = 5  # looks in a row at which nobody answers where the head was


def words(job: Job, head: str, own: str, folder: Path | None) -> list[str]:
    """What `ray` is told on a machine whose address is `own`, where `head` is ADDRESS:PORT.

    `folder` is where Ray writes on all of them; the head alone is told of it.
    """
    each, *_ = bundles(job)
    where = [f"--address={head}"]
    if folder is not None:
        where = ["--head", f"--port={head.rpartition(':')[2]}", f"--temp-dir={folder}"]
        where += [f"--dashboard-host={LOOPBACK}"]
    return [
        *("start", "--block", "--disable-usage-stats", *where, f"--node-ip-address={own}"),
        *(f"--{name}={value}" for name, value in started_with(each).items()),
        # Its default is one number, which two nodes that share a machine cannot both have.
        f"--dashboard-agent-listen-port={_free_port()}",
    ]


def run(job: Job, file: Path, where: Rendezvous, drive: Callable[[], int], wait: int) -> int:
    """Starts this machine's part of the cluster; on the first one, what `drive` says when it has run there.

    The others end when the first one has. Raises UsageError where these are not the machines of the job, and
    LaunchUnavailable where Ray does not start, or its head is not there within `wait` seconds.
    """
    if where.is_rank or where.nodes != job.nodes:
        raise UsageError(
            f"--start: the job has {job.nodes} nodes, with one process on each; {where.source} says"
            f" {where.nodes} ({where.reason})"
        )
    imported()  # where it is not installed, nothing is begun
    address = _reached_at(where.address)
    head, token = f"{address}:{where.port or _free_port()}", file.parent / TOKEN
    log = file.parent / f"ray-{where.node_rank}.log"
    os.environ |= {"RAY_AUTH_TOKEN_PATH": str(token), "RAY_ADDRESS": head}
    if where.node_rank == 0:
        _write_token(token)
        with _started(job, head, address, token, log, first=True) as ray:
            _until_up(ray, head, log, wait)
            return drive()
    deadline = time.monotonic() + wait
    while not _answers(head):
        if time.monotonic() > deadline:
            raise LaunchUnavailable(f"no head of Ray at {head} within {wait} s")
        time.sleep(_LOOK_SECONDS)
    # Told to save and end, the first one has all nodes do so, and this one is needed until then.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with _started(job, head, own_address(address), token, log, first=False) as ray:
        silent = 0
        while silent < _SILENT:
            time.sleep(_LOOK_SECONDS)
            silent = 0 if _answers(head) else silent + 1
            if not silent and ray.poll() is not None:
                raise LaunchUnavailable(f"Ray has ended on this machine; {log} says why")
    return int(ExitCode.OK)  # how the job ended is the first machine's word


@contextmanager
def _started(
    job: Job, head: str, own: str, token: Path, log: Path, *, first: bool
) -> Iterator[subprocess.Popen[bytes]]:
    """Ray's processes of this machine, for as long as this lasts; whoever started us says nothing to them."""
    # Of a name that nobody can know before, so that nobody else has made it.
    folder = Path(tempfile.gettempdir()) / f"ray-{json_digest(files.read(token))}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with log.open("ab") as out:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts"),
                *words(job, head, own, folder if first else None),
            ],
            env=unstarted(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            preexec_fn=death_signal(signal.SIGTERM),
        )
    try:
        yield process
    finally:
        if first:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
        process.kill()  # and with it all that it has started: without its head a cluster has nothing to save
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _until_up(process: subprocess.Popen[bytes], head: str, log: Path, wait: int) -> None:
    """Returns when the head takes a driver. Raises LaunchUnavailable where it does not."""
    ray, deadline = imported(), time.monotonic() + wait
    said = "it does not answer"
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if _answers(head):
                ray.init(address=head, log_to_driver=False, logging_level=logging.ERROR)
                ray.shutdown()
                return
        except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
            said = why(error)
        time.sleep(_LOOK_SECONDS)
    raise LaunchUnavailable(f"Ray did not start on this machine: {said}; {log} has what it wrote")


def _write_token(path: Path) -> None:
    path.unlink(missing_ok=True)
    with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(secrets.token_hex(32))


def _reached_at(name: str) -> str:
    """The address of the first machine, as the others reach it."""
    found = socket.gethostbyname(name)
    # Debian has a machine's own name mean 127.0.1.1 there.
    return own_address(_ELSEWHERE) if found.startswith("127.") and found != LOOPBACK else found


def _answers(head: str) -> bool:
    host, _, port = head.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_LOOK_SECONDS).close()
    except OSError:
        return False
    return True


def _free_port() -> int:
    with closing(socket.create_server(("", 0))) as free:
        return int(free.getsockname()[1])
