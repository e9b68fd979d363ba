"""Runs a local launch of two ranks of a module, as the `train` verb would: LOGS MODULE ARGUMENTS...

PET_* variables make it one node of several.
"""

import os
import sys
from pathlib import Path

from bundle.launchers import local, process
from bundle.rendezvous.discovery import discover

if __name__ == "__main__":
    logs, module, *arguments = sys.argv[1:]
    where = discover({name: value for name, value in os.environ.items() if name.startswith("PET_")})
    wait = int(os.environ.get("TEST_WAIT", "600"))
    launch = local.Launch(tuple(arguments), where, 2, Path(logs).absolute(), wait=wait, module=module)
    try:
        process.run(launch, os.environ)
    except process.Ended as ended:
        print(ended, file=sys.stderr)
        sys.exit(int(ended.code))
