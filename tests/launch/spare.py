"""A node among several without ranks: NUMBER NODES SPARES FOLDER DOES..., each of which is how a round ends.

`well`, `killed`, `bad`, `lost` (another node), `disk` and `saved` are how; `hang` does not end, `held` not
before there is a file `go`. It prints the nodes of each round that it takes part in, and where they meet; and
the verdict, as JSON.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bundle.errors import ExitCode
from bundle.launch import node_registry, nodes, spares
from bundle.launch.causes import FailureKind, RestartAction
from bundle.launch.process import LaunchFailed
from bundle.launch.rendezvous import Rendezvous
from bundle.launch.verdict import Verdict

for module in (node_registry, spares):
    module.__dict__["LOST_SECONDS"] = 20.0
node_registry.HEARTBEAT_SECONDS = 0.5
NUMBER, NODES, SPARES = map(int, sys.argv[1:4])
FOLDER, DOES = Path(sys.argv[4]), sys.argv[5:]
GO = FOLDER / "go"


def verdict(kind: FailureKind, cause: str, action: RestartAction, node_rank: int, code: int = 1) -> Verdict:
    return Verdict(ExitCode(code), kind, cause, action, node=f"gpu{NUMBER}", node_rank=node_rank, nodes=NODES)


def everybody_has_looked() -> bool:
    """Whether no node came so late that it has not seen this round."""
    signs = (node_registry.Heartbeat.from_file_name(path.name) for path in (FOLDER / "roster").glob("beat-*"))
    return len([sign for sign in signs if sign and sign.count > 2]) >= NODES


def start(where: Rendezvous, continues: bool, alive: Callable[[], None]) -> None:
    print(f"round {where.node_rank}/{where.nodes} {where.address} {continues}", flush=True)
    does = DOES.pop(0) if DOES else "well"
    until = time.monotonic() + (60 if does == "hang" else 1.0)
    while time.monotonic() < until or not everybody_has_looked() or (does == "held" and not GO.exists()):
        alive()
        time.sleep(0.05)
    here = where.node_rank
    ends = {
        "killed": verdict(FailureKind.KILLED, "killed by SIGKILL", RestartAction.RESTART, here),
        "bad": verdict(FailureKind.DEVICE, "its GPU failed", RestartAction.RESTART_WITHOUT, here),
        "lost": nodes.build_lost_node_verdict(["gpu9"], "no heartbeat"),
        "disk": verdict(FailureKind.DISK, "its disk is full", RestartAction.STOP, here),
        "saved": verdict(FailureKind.PREEMPTED, "stopped at step 5 as told", RestartAction.RESTART, here, 75),
    }
    if does in ends:
        raise LaunchFailed(ends[does])


if __name__ == "__main__":
    where = Rendezvous(NODES, NUMBER, "127.0.0.1", 1234, "test", "said")
    one = spares.NodeRunnerWithSpares(
        where, SPARES, FOLDER, wait=int(os.environ.get("TEST_WAIT", "60")), most_restarts=1
    )
    unfit = "its disk is broken" if DOES[:1] == ["unfit"] else ""
    try:
        one.run(start, lambda: None, unfit)
    except LaunchFailed as ended:
        print(json.dumps(ended.verdict.dump()), flush=True)
        sys.exit(int(ended.code))
