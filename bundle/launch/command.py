"""The command that starts this node's ranks, torchrun, as a text that a person can paste too."""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bundle.launch.rendezvous import LOOPBACK, Rendezvous

_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|PRIVATE|(^|_)KEY($|_)", re.IGNORECASE)
# Without SIGTERM: we pass that on ourselves, and torchrun would kill ranks that are writing a checkpoint.
# Given as torchrun's default, not as an option: torch before 2.13 does not know it and ignores it there.
_SIGNALS = "SIGINT,SIGHUP,SIGQUIT"

WAIT_SECONDS = 1800  # machines of one job may be given at different times


class Command(NamedTuple):
    """An argument vector, the variables set for it and the inherited variables kept from it."""

    argv: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()
    removed_variables: tuple[str, ...] = ()

    def build_environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of the command."""
        variables = {name: value for name, value in inherited.items() if name not in self.removed_variables}
        return variables | dict(self.variables)

    def to_shell(self) -> str:
        """One line that a POSIX shell runs as this command; values of secrets are redacted."""
        words = [f"--unset={name}" for name in self.removed_variables]
        words += [f"{name}={redact(name, value)}" for name, value in self.variables]
        return shlex.join([*(["env", *words] if words else []), *self.argv])


def redact(name: str, value: str) -> str:
    """`value`, or stars where the variable's name says that nobody else may read it."""
    return "***" if _SECRET.search(name) else value


@dataclass(frozen=True)
class Launch:
    """What is started on every node.

    `arguments` are those of `mcore-bundle`; `logs` is this launch's own folder on this node, where `files`
    lie, by name, before the ranks start; `environment` is that of the plan, in which what
    `overridable_variables` names is left as it is inherited. With `has_events`, the first rank writes the
    events of `train --json`.
    """

    arguments: tuple[str, ...]
    rendezvous: Rendezvous
    per_node: int
    logs: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    overridable_variables: frozenset[str] = frozenset()
    files: Mapping[str, str] = field(default_factory=dict)
    wait: int = WAIT_SECONDS  # that this node waits for the others
    python: str = sys.executable
    module: str = "bundle"
    has_events: bool = False


def build_command(launch: Launch, inherited: Mapping[str, str]) -> Command:
    """The command for one node, which is started with the variables `inherited`."""
    rendezvous = launch.rendezvous
    options = [f"--nnodes={rendezvous.nodes}", f"--nproc-per-node={launch.per_node}"]
    inherited_names = launch.overridable_variables & inherited.keys()
    variables = {"PET_SIGNALS_TO_HANDLE": _SIGNALS}
    variables |= {name: value for name, value in launch.environment.items() if name not in inherited_names}
    if rendezvous.nodes == 1:
        # The agent meets itself in a file and rank 0 listens on loopback: nothing of a one-node run can be
        # reached from outside. A store of the agent would listen on every interface.
        options += ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--local-addr={LOOPBACK}"]
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    else:
        address = f"[{rendezvous.address}]" if ":" in rendezvous.address else rendezvous.address
        options += [
            "--rdzv-backend=static",
            f"--rdzv-endpoint={address}:{rendezvous.port}",
            f"--node-rank={rendezvous.node_rank}",
            # Longer than we let it: what torchrun says of a time-out names neither the nodes nor the wait.
            f"--rdzv-conf=timeout={2 * launch.wait}",
        ]
    options += [
        "--rdzv-id=ranks",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        f"--log-dir={launch.logs}",
        f"--redirects={_format_redirects(launch.per_node)}",
    ]
    # torchrun substitutes ${local_rank} in the arguments of the ranks; a doubled $ reaches them as one.
    arguments = [argument.replace("$", "$$") for argument in launch.arguments]
    argv = [launch.python, "-m", "torch.distributed.run", *options, "-m", launch.module, *arguments]
    removed_variables = tuple(
        sorted(name for name in inherited if name.startswith("PET_") and name not in variables)
    )
    return Command(tuple(argv), tuple(sorted(variables.items())), removed_variables)


def format_dry_run(launches: Sequence[Launch], inherited: Mapping[str, str]) -> str:
    """What would run, one command per node under a line that names the node."""
    lines = []
    for node, launch in enumerate(launches):
        lines += [f"# node {node} of {len(launches)}", build_command(launch, inherited).to_shell()]
    return "\n".join(lines) + "\n"


def _format_redirects(per_node: int) -> str:
    """Which streams go to the log folder: all but what the first rank of the node prints."""
    return ",".join(f"{rank}:{2 if rank == 0 else 3}" for rank in range(per_node))
