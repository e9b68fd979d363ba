"""Runs a local launch of two ranks of the worker beside this file, as the `train` verb would."""

import os
import sys
from pathlib import Path

from bundle.launchers import local, process
from bundle.rendezvous import discover

if __name__ == "__main__":
    launch = local.Launch(
        tuple(sys.argv[2:]), discover({}), 2, Path(sys.argv[1]).absolute(), module="tests.launchers.worker"
    )
    try:
        process.run(launch, os.environ)
    except process.Ended as ended:
        print(ended, file=sys.stderr)
        sys.exit(int(ended.code))
