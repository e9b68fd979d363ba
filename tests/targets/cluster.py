"""A real Slurm of three nodes on this machine: slurmctld, and each slurmd in namespaces of its own.

Nobody is authenticated (auth/none), so all of it listens on loopback. The daemons are Debian's (slurmctld,
slurmd, slurm-client); they need root for the namespaces.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

NODES = 3
_CONFIGURATION = """ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
KillWait=30
SlurmdTimeout={timeout}
SlurmdParameters=config_overrides
{nodes}
PartitionName=debug Nodes=node[1-{count}] Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why there can be no cluster here; None where there can."""
    absent = [name for name in ("slurmctld", "slurmd", "sbatch", "unshare") if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed: apt-get install slurmctld slurmd slurm-client"
    return None if os.geteuid() == 0 else "not root: its nodes need namespaces"


@contextmanager
def cluster(root: Path, timeout: int = 10, within: Sequence[str] = ()) -> Iterator[dict[str, str]]:
    """Runs the cluster in the empty directory `root`; gives the variables that Slurm's clients need.

    A node that has not answered for `timeout` seconds is down. `within` are the words of a command that runs
    the daemon of each node. What is mounted there is mounted on all nodes.
    """
    ports = free_ports(NODES + 1)
    nodes = "\n".join(
        f"NodeName=node{n} NodeHostname=node{n} NodeAddr=127.0.0.1 Port={ports[n]} CPUs=2 RealMemory=4000"
        " State=UNKNOWN"
        for n in range(1, NODES + 1)
    )
    configuration, hosts = root / "slurm.conf", root / "hosts"
    configuration.write_text(
        _CONFIGURATION.format(root=root, ports=ports, nodes=nodes, count=NODES, timeout=timeout)
    )
    names = (socket.gethostname(), *(f"node{n}" for n in range(1, NODES + 1)))
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"127.0.0.1 {name}\n" for name in names))
    (root / "state").mkdir()
    environment = os.environ | {"SLURM_CONF": str(configuration)}
    # The name of a node in its own namespace, where /etc/hosts is another: the machine's own is not touched.
    as_node = 'mount --bind "$1" /etc/hosts; hostname "$2"; exec slurmd -D -N "$2" -f "$3"'
    with ExitStack() as running, (root / "daemons.log").open("wb") as log:

        def start(*command: str) -> None:
            daemon = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            running.callback(daemon.wait, 30)
            running.callback(daemon.terminate)

        start("slurmctld", "-D", "-i", "-f", str(configuration))
        for n in range(1, NODES + 1):
            start(
                *within,
                *("unshare", "-m", "--propagation=slave", "-u"),
                *("sh", "-ec", as_node, "sh", str(hosts), f"node{n}", str(configuration)),
            )
        running.callback(_clear, environment)
        deadline = time.monotonic() + 60
        while _said(environment, "sinfo", "--noheader", "--format=%D %t") != f"{NODES} idle":
            assert time.monotonic() < deadline, (root / "daemons.log").read_text()[-2000:]
            time.sleep(0.1)
        yield environment


def kill(node: str, configuration: str, number: signal.Signals = signal.SIGKILL) -> None:
    """Ends all that runs on a node at once, as the power does: whatever is in the namespace of its daemon.

    With SIGSTOP, the node answers no more.
    """
    processes = [path for path in Path("/proc").iterdir() if path.name.isdecimal()]
    daemon = next(
        path
        for path in processes
        if _words(path)[:1] == ["slurmd"] and {node, configuration} <= set(_words(path))
    )
    namespace = (daemon / "ns/uts").readlink()
    for path in processes:
        with suppress(OSError):  # it has ended by itself
            if (path / "ns/uts").readlink() == namespace:
                os.kill(int(path.name), number)


def _words(process: Path) -> list[str]:
    try:
        return (process / "cmdline").read_text().split("\0")
    except OSError:
        return []


def _said(environment: dict[str, str], *command: str) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip()


def _clear(environment: dict[str, str]) -> None:
    """Ends every job, so that no step outlives its daemon."""
    _said(environment, "scancel", "--full", "--signal=KILL", "--user=root")
    _said(environment, "scancel", "--user=root")
    deadline = time.monotonic() + 30
    while _said(environment, "squeue", "--noheader") and time.monotonic() < deadline:
        time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]
