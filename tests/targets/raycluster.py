"""A real Ray of two machines on this one: a head and a second raylet, in namespaces of network and processes.

Ray listens on every interface, whatever it is told, so that its network is one that nobody else is in;
whoever speaks to it has its token. All that it started ends with the first process of its namespace.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

SECONDS = 600  # for a start on a busy machine
_RAY = str(Path(sys.executable).with_name("ray"))
_PORTS = ("6399", "6400")
_INSIDE = ("unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child")
# Ray waits for the agents of a machine for 15 seconds and no more: on a busy machine it takes another try.
_MACHINES = """ports() {
    echo --metrics-export-port=$1 --dashboard-agent-listen-port=$(($1 + 1))
    echo --dashboard-agent-grpc-port=$(($1 + 2)) --runtime-env-agent-port=$(($1 + 3))
    echo --node-ip-address=127.0.0.1 --num-cpus=1 --object-store-memory=100000000 --disable-usage-stats
}
"$1" start --head --port=$3 --dashboard-port=8299 --temp-dir="$4" $(ports 8301)
first=8311
until "$1" start --address=127.0.0.1:$3 $(ports $first); do first=$((first + 10)); done
"""
_START = f"""ip link set lo up
{_MACHINES}
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

    root: Path
    holder: subprocess.Popen[bytes]
    environment: dict[str, str]
    session: str  # where Ray writes; short, since a name of a socket has 107 bytes at most
    address: str = "http://127.0.0.1:8299"

    def command(self, folder: Path, *words: str) -> list[str]:
        """A command as it is run in a directory beside the cluster."""
        inside = f"--target={self.first}"
        return ["nsenter", inside, "--net", "--pid", "--mount", f"--wdns={folder}", *words]

    def lose_head(self) -> None:
        """Kills at once all that runs on the first machine, which is all that is not of the other."""
        namespace = Path(f"/proc/{self.first}/ns/pid").readlink()
        parents = {}
        for path in Path("/proc").iterdir():
            with suppress(OSError):  # it has ended by itself
                if path.name.isdecimal() and (path / "ns/pid").readlink() == namespace:
                    parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        (other,) = (pid for pid in parents if _is_raylet(pid) and "--head" not in _words(pid))
        kept = {self.first, other}
        while grown := {pid for pid, parent in parents.items() if parent in kept - {self.first}} - kept:
            kept |= grown
        for pid in parents.keys() - kept:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def begin_again(self) -> None:
        """Starts another head, and another machine beside it, as whoever made the first ones does."""
        environment = {name: value for name, value in self.environment.items() if name != "RAY_ADDRESS"}
        # At another address: what is left of the first cluster still looks for its head.
        script = self.command(
            self.root, "sh", "-ec", _MACHINES, "sh", _RAY, str(self.root), _PORTS[1], self.session
        )
        with (self.root / "daemons.log").open("ab") as log:
            subprocess.run(script, env=environment, stdout=log, stderr=log, timeout=SECONDS, check=True)
        self.environment["RAY_ADDRESS"] = f"127.0.0.1:{_PORTS[1]}"

    @property
    def first(self) -> int:
        """The first process inside, by its number out here."""
        return int(Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children").read_text().split()[0])


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def _is_raylet(pid: int) -> bool:
    return Path(_words(pid)[0] if _words(pid) else "").name == "raylet"


@contextmanager
def cluster(root: Path) -> Iterator[Cluster]:
    """Runs the cluster, with what it writes in the empty directory `root`."""
    (root / "token").write_text(secrets.token_hex(32))
    environment = os.environ | {
        "HOME": str(root),
        "TMPDIR": str(root),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(root / "token"),
        "RAY_ADDRESS": f"127.0.0.1:{_PORTS[0]}",
        "RAY_API_SERVER_ADDRESS": Cluster.address,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "60",
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": str(SECONDS),
        "RAY_worker_niceness": "0",  # not behind all else, as Ray has its workers by default: 15
    }
    with (root / "daemons.log").open("wb") as log, TemporaryDirectory(dir="/tmp") as session:
        holder = subprocess.Popen(
            [*_INSIDE, "sh", "-ec", _START, "sh", _RAY, str(root), _PORTS[0], session],
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
            yield Cluster(root, holder, environment, session)
        finally:
            holder.kill()
            holder.wait()
