"""A node among several without ranks: NUMBER NODES SPARES FOLDER DOES..., each of which is how a round ends.

`well`, `killed`, `bad`, `lost` (another node), `disk` and `saved` are how; `hang` does not end, `held` not
before there is a file `go`. It prints the nodes of each round that it takes part in, and where they meet.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bundle.errors import ExitCode
from bundle.launch import nodes, roster, spares
from bundle.launch.causes import Action, Kind
from bundle.launch.process import Ended
from bundle.launch.rendezvous import Rendezvous
from bundle.launch.verdict import Verdict

for module in (roster, spares):
    module.__dict__["LOST_SECONDS"] = 20.0
roster.BEAT_SECONDS = 0.5
NUMBER, NODES, SPARES = map(int, sys.argv[1:4])
FOLDER, DOES = Path(sys.argv[4]), sys.argv[5:]
GO = FOLDER / "go"


def verdict(kind: Kind, cause: str, action: Action, node_rank: int, code: int = 1) -> Verdict:
    return Verdict(ExitCode(code), kind, cause, action, node=f"gpu{NUMBER}", node_rank=node_rank, nodes=NODES)


def everybody_has_looked() -> bool:
    """Whether no node came so late that it has not seen this round."""
    signs = (roster.Sign.parse(path.name) for path in (FOLDER / "roster").glob("beat-*"))
    return len([sign for sign in signs if sign and sign.beat > 2]) >= NODES


def start(where: Rendezvous, continues: bool, alive: Callable[[], None]) -> None:
    print(f"round: {where.node_rank} of {where.nodes} at {where.address}, {continues}", flush=True)
    does = DOES.pop(0) if DOES else "well"
    until = time.monotonic() + (60 if does == "hang" else 1.0)
    while time.monotonic() < until or not everybody_has_looked() or (does == "held" and not GO.exists()):
        alive()
        time.sleep(0.05)
    here = where.node_rank
    ends = {
        "killed": verdict(Kind.KILLED, "killed by SIGKILL", Action.RESTART, here),
        "bad": verdict(Kind.DEVICE, "its GPU failed", Action.RESTART_WITHOUT, here),
        "lost": nodes.lost(["gpu9"], "no word from it"),
        "disk": verdict(Kind.DISK, "its disk is full", Action.STOP, here),
        "saved": verdict(Kind.PREEMPTED, "stopped at step 5 as told", Action.RESTART, here, 75),
    }
    if does in ends:
        raise Ended(ends[does])


if __name__ == "__main__":
    where = Rendezvous(NODES, NUMBER, "127.0.0.1", 1234, "test", "said")
    one = spares.Spares(where, SPARES, FOLDER, wait=int(os.environ.get("TEST_WAIT", "60")), most=1)
    unfit = "its disk is broken" if DOES[:1] == ["unfit"] else ""
    try:
        one.run(start, lambda: None, unfit)
    except Ended as ended:
        print(ended.verdict.sentence, flush=True)
        sys.exit(int(ended.code))
