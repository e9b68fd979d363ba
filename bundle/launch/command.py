"""The command that starts this node's ranks by torchrun, also as a text for a shell."""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bundle.launch.rendezvous import LOOPBACK, Rendezvous

_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|PRIVATE|(^|_)KEY($|_)", re.IGNORECASE)
# Without SIGTERM: we forward it, and torchrun would kill ranks that write a checkpoint. It is set by a
# variable, not an option: torch before 2.13 ignores the variable, and does not have the option.
_SIGNALS_DELEGATED_TO_TORCHRUN = "SIGINT,SIGHUP,SIGQUIT"

NODE_WAIT_SECONDS = 1800  # a scheduler may start the machines of one job at different times


class Command(NamedTuple):
    """An argument vector, the variables set for it, and the inherited variables removed from it."""

    argv: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()
    removed_variables: tuple[str, ...] = ()

    def build_environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the complete environment of the command."""
        variables = {name: value for name, value in inherited.items() if name not in self.removed_variables}
        return variables | dict(self.variables)

    def to_redacted_shell(self) -> str:
        """Return one line that a POSIX shell runs as this command; values of secrets are redacted."""
        words = [f"--unset={name}" for name in self.removed_variables]
        words += [f"{name}={redact(name, value)}" for name, value in self.variables]
        return shlex.join([*(["env", *words] if words else []), *self.argv])


def redact(name: str, value: str) -> str:
    """Return `value`, or stars where the variable's name marks it as a secret."""
    return "***" if _SECRET.search(name) else value


@dataclass(frozen=True)
class Launch:
    """The start of the ranks of one node.

    `arguments` are those of `mcore-bundle`. `logs` is the folder of this launch on this node, where the
    `files` lie by name before the ranks start. `environment` is that of the plan; an inherited value wins for
    the variables in `overridable_variables`. `has_events`: the first rank writes the events of `train
    --json`.
    """

    arguments: tuple[str, ...]
    rendezvous: Rendezvous
    per_node: int
    logs: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    overridable_variables: frozenset[str] = frozenset()
    files: Mapping[str, str] = field(default_factory=dict)
    wait: int = NODE_WAIT_SECONDS  # the seconds that this node waits for the others
    python: str = sys.executable
    module: str = "bundle"
    has_events: bool = False


def build_command(launch: Launch, inherited: Mapping[str, str]) -> Command:
    """Return the command for one node, which is started with the variables `inherited`."""
    rendezvous = launch.rendezvous
    options = [f"--nnodes={rendezvous.nodes}", f"--nproc-per-node={launch.per_node}"]
    inherited_names = launch.overridable_variables & inherited.keys()
    variables = {"PET_SIGNALS_TO_HANDLE": _SIGNALS_DELEGATED_TO_TORCHRUN}
    variables |= {name: value for name, value in launch.environment.items() if name not in inherited_names}
    if rendezvous.nodes == 1:
        # A store of the agent would listen on every interface. With a file for the agent and loopback for
        # rank 0, nothing of a one-node run can be reached from outside.
        options += ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--local-addr={LOOPBACK}"]
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    else:
        address = f"[{rendezvous.address}]" if ":" in rendezvous.address else rendezvous.address
        options += [
            "--rdzv-backend=static",
            f"--rdzv-endpoint={address}:{rendezvous.port}",
            f"--node-rank={rendezvous.node_rank}",
            # Longer than our own limit, as torchrun's message names neither the nodes nor the wait.
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
    """Return the text of a dry run: one command per node under a line that names the node."""
    lines = []
    for node, launch in enumerate(launches):
        lines += [f"# node {node} of {len(launches)}", build_command(launch, inherited).to_redacted_shell()]
    return "\n".join(lines) + "\n"


def _format_redirects(per_node: int) -> str:
    """Return the streams that go to the log folder: all except stdout of the node's first rank."""
    return ",".join(f"{rank}:{2 if rank == 0 else 3}" for rank in range(per_node))
