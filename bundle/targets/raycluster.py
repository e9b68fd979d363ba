"""A Ray cluster on the machines where a scheduler has started us; the first one has the head and the driver.

The cluster serves this job alone. Its token lies in a file beside the job file that no other user may read;
its dashboard is on loopback. The whole cluster ends with its head. Options of `ray start`:
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
from bundle.errors import ExitCode, TargetUnavailable, UsageError
from bundle.files import compute_short_json_digest
from bundle.launch.job import Job
from bundle.launch.orphans import prepare_parent_death_signal
from bundle.launch.rendezvous import LOOPBACK, Rendezvous, find_own_address
from bundle.launch.starters import remove_starter_variables
from bundle.targets.ray import (
    TOKEN_NAME,
    build_placement_bundles,
    build_start_command_options,
    describe_error,
    import_ray,
)

_POLL_SECONDS = 1.0
_SHUTDOWN_TIMEOUT_SECONDS = 30  # the time for Ray's processes to end
_TEST_NET_PROBE_ADDRESS = "192.0.2.1"  # reserved, so nobody has it (RFC 5737); nothing is sent there
_MOST_SILENT_POLLS = 5  # failed connections to the head in a row


def build_head_or_worker_arguments(job: Job, head: str, node_address: str, folder: Path | None) -> list[str]:
    """Return the arguments of `ray` on a machine with the address `node_address`.

    `head` is the head's ADDRESS:PORT. `folder` is where Ray writes on all machines; only the head gets it as
    an option.
    """
    bundle, *_ = build_placement_bundles(job)
    role_options = [f"--address={head}"]
    if folder is not None:
        role_options = ["--head", f"--port={head.rpartition(':')[2]}", f"--temp-dir={folder}"]
        role_options += [f"--dashboard-host={LOOPBACK}"]
    return [
        *("start", "--block", "--disable-usage-stats", *role_options, f"--node-ip-address={node_address}"),
        *(f"--{name}={value}" for name, value in build_start_command_options(bundle).items()),
        # Its default is one fixed port, which two nodes on one machine cannot share.
        f"--dashboard-agent-listen-port={_find_free_port()}",
    ]


def run_node(job: Job, file: Path, rendezvous: Rendezvous, drive: Callable[[], int], wait: int) -> int:
    """Start this machine's part of the cluster and return the exit code.

    On the first machine, run `drive` there and return its code; the others end when the first one has ended.
    Raise UsageError where the machines are not those of the job. Raise TargetUnavailable where Ray does not
    start, or where its head does not answer within `wait` seconds.
    """
    if rendezvous.is_rank or rendezvous.nodes != job.nodes:
        raise UsageError(
            f"--start: needs one process on each node of the job (nodes: {job.nodes}), but"
            f" {rendezvous.source} has {rendezvous.nodes} ({rendezvous.reason})"
        )
    import_ray()  # raises before anything starts, where it is not installed
    address = _resolve_reachable_head_address(rendezvous.address)
    head, token = f"{address}:{rendezvous.port or _find_free_port()}", file.parent / TOKEN_NAME
    log = file.parent / f"ray-{rendezvous.node_rank}.log"
    os.environ |= {"RAY_AUTH_TOKEN_PATH": str(token), "RAY_ADDRESS": head}
    if rendezvous.node_rank == 0:
        _write_token(token)
        with _run_ray(job, head, address, token, log, is_head=True) as ray:
            _wait_for_head(ray, head, log, wait)
            return drive()
    deadline = time.monotonic() + wait
    while not _is_reachable(head):
        if time.monotonic() > deadline:
            raise TargetUnavailable(f"no Ray head answered at {head} within {wait} s")
        time.sleep(_POLL_SECONDS)
    # The first machine passes a request to save and end on to all nodes, so this one must stay until then.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with _run_ray(job, head, find_own_address(address), token, log, is_head=False) as ray:
        silent_polls = 0
        while silent_polls < _MOST_SILENT_POLLS:
            time.sleep(_POLL_SECONDS)
            silent_polls = 0 if _is_reachable(head) else silent_polls + 1
            if not silent_polls and ray.poll() is not None:
                raise TargetUnavailable(f"Ray has ended on this machine. See {log}")
    return int(ExitCode.OK)  # the first machine returns the job's exit code


@contextmanager
def _run_ray(
    job: Job, head: str, node_address: str, token: Path, log: Path, *, is_head: bool
) -> Iterator[subprocess.Popen[bytes]]:
    """Run Ray's processes of this machine within the context; they get no signals from our starter."""
    # The name comes from the secret token, so no other user can create the folder first.
    folder = Path(tempfile.gettempdir()) / f"ray-{compute_short_json_digest(files.read_text_if_small(token))}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with log.open("ab") as out:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts"),
                *build_head_or_worker_arguments(job, head, node_address, folder if is_head else None),
            ],
            env=remove_starter_variables(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            preexec_fn=prepare_parent_death_signal(signal.SIGTERM),
        )
    try:
        yield process
    finally:
        if is_head:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_SHUTDOWN_TIMEOUT_SECONDS)
        process.kill()  # and all that it started; without its head a cluster has nothing to save
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for_head(process: subprocess.Popen[bytes], head: str, log: Path, wait: int) -> None:
    """Wait until the head accepts a driver. Raise TargetUnavailable where it does not."""
    ray, deadline = import_ray(), time.monotonic() + wait
    reason = "it does not answer"
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if _is_reachable(head):
                ray.init(address=head, log_to_driver=False, logging_level=logging.ERROR)
                ray.shutdown()
                return
        except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
            reason = describe_error(error)
        time.sleep(_POLL_SECONDS)
    raise TargetUnavailable(f"Ray did not start on this machine: {reason}. See {log}")


def _write_token(path: Path) -> None:
    path.unlink(missing_ok=True)
    with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(secrets.token_hex(32))


def _resolve_reachable_head_address(name: str) -> str:
    """Return the address at which the other machines reach the first one."""
    address = socket.gethostbyname(name)
    # Debian resolves a machine's own name to 127.0.1.1 on that machine.
    return (
        find_own_address(_TEST_NET_PROBE_ADDRESS)
        if address.startswith("127.") and address != LOOPBACK
        else address
    )


def _is_reachable(head: str) -> bool:
    host, _, port = head.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_POLL_SECONDS).close()
    except OSError:
        return False
    return True


def _find_free_port() -> int:
    with closing(socket.create_server(("", 0))) as free:
        return int(free.getsockname()[1])
