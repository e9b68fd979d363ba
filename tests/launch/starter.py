"""Runs a local launch of two ranks of a module, as the `train` verb would: LOGS MODULE ARGUMENTS...

PET_* variables make it one node of several; with TEST_STOPPED_AT_ONCE, SIGTERM comes with its agent.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from bundle.launch import process
from bundle.launch.command import Launch
from bundle.launch.rendezvous import discover
from tests.launch.launched import common


class StoppedAtOnce(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    if "TEST_STOPPED_AT_ONCE" in os.environ:
        subprocess.Popen = StoppedAtOnce  # type: ignore[misc]
    logs, module, *arguments = sys.argv[1:]
    where = discover({name: value for name, value in os.environ.items() if name.startswith("PET_")})
    wait = int(os.environ.get("TEST_WAIT", "600"))
    launch = Launch(
        tuple(arguments), where, 2, Path(logs).absolute(), wait=wait, module=module, **common(where.nodes)
    )
    try:
        process.run_ranks_once(launch, os.environ)
    except process.LaunchFailed as ended:
        print(ended, file=sys.stderr)
        sys.exit(int(ended.code))
