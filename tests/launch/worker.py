"""A rank without torch: does what its first argument says, and ends as ranks of ours do."""

import os
import signal
import sys
import time
from pathlib import Path

from bundle.errors import EnvironmentUnfit, Preempted
from bundle.launch import outcomes
from bundle.launch.process import die_with_parent

RANK, LOCAL_RANK = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])


def wait_for_request() -> None:
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    Path(f"ready-{RANK}").touch()
    while not asked and not outcomes.asked_to_stop():
        time.sleep(0.02)
    raise Preempted(f"saved step 7 on request of rank {RANK}")


def sleep() -> None:
    Path(f"ready-{RANK}").touch()
    time.sleep(60)


def fail() -> None:
    if RANK == 1:
        print("what the log says", file=sys.stderr)
        raise ValueError("corrupt shard 3")
    sleep()


def unfit() -> None:
    if RANK == 1:
        raise EnvironmentUnfit("no such device")
    sleep()


def stubborn() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep()


def well() -> None:
    print(f"rank {RANK} of {os.environ['WORLD_SIZE']} {sys.argv[2:]}")


if __name__ == "__main__":
    die_with_parent()
    os._exit(outcomes.report(RANK, LOCAL_RANK, globals()[sys.argv[1]]))
