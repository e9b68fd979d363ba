"""A real Ray of two machines on this one: a head and a second raylet, in namespaces of network and processes.

Ray listens on every interface, whatever it is told, so that its network is one that nobody else is in;
whoever speaks to it has its token. All that it started ends with the first process of its namespace.
"""

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

SECONDS = 600  # for a start on a busy machine
_INSIDE = ("unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child")
# Ray waits for the agents of a machine for 15 seconds and no more: on a busy machine it takes another try.
_START = """ip link set lo up
ports() {
    echo --metrics-export-port=$1 --dashboard-agent-listen-port=$(($1 + 1))
    echo --dashboard-agent-grpc-port=$(($1 + 2)) --runtime-env-agent-port=$(($1 + 3))
    echo --node-ip-address=127.0.0.1 --num-cpus=1 --object-store-memory=100000000 --disable-usage-stats
}
"$1" start --head --port=6399 --dashboard-port=8299 --temp-dir="$2/ray" $(ports 8301)
first=8311
until "$1" start --address=127.0.0.1:6399 $(ports $first); do first=$((first + 10)); done
touch "$2/up"
exec sleep infinity
"""


def missing() -> str | None:
    """Why there can be no cluster here; None where there can."""
    if find_spec("ray") is None:
        return "ray is not installed: pip install 'mcore-bundle[ray]'"
    absent = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    return None if os.geteuid() == 0 else "not root: its machines need namespaces"


@dataclass
class Cluster:
    """What is inside, and how a command gets there."""

    holder: subprocess.Popen[bytes]
    environment: dict[str, str]
    address: str = "http://127.0.0.1:8299"

    def command(self, folder: Path, *words: str) -> list[str]:
        """A command as it is run in a directory beside the cluster."""
        inside = Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children").read_text().split()[0]
        return ["nsenter", f"--target={inside}", "--net", "--pid", "--mount", f"--wdns={folder}", *words]


@contextmanager
def cluster(root: Path) -> Iterator[Cluster]:
    """Runs the cluster, with what it writes in the empty directory `root`."""
    (root / "token").write_text(secrets.token_hex(32))
    environment = os.environ | {
        "HOME": str(root),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(root / "token"),
        "RAY_ADDRESS": "127.0.0.1:6399",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "60",
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": str(SECONDS),
        "RAY_worker_niceness": "0",  # not behind all else, as Ray has its workers by default: 15
    }
    program = Path(sys.executable).with_name("ray")
    with (root / "daemons.log").open("wb") as log:
        holder = subprocess.Popen(
            [*_INSIDE, "sh", "-ec", _START, "sh", str(program), str(root)],
            env={name: value for name, value in environment.items() if name != "RAY_ADDRESS"},
            stdout=log,
            stderr=log,
        )
        try:
            deadline = time.monotonic() + SECONDS
            while not (root / "up").exists():
                assert holder.poll() is None and time.monotonic() < deadline, (
                    root / "daemons.log"
                ).read_text()[-3000:]
                time.sleep(0.2)
            yield Cluster(holder, environment)
        finally:
            holder.kill()
            holder.wait()
