"""Runs the tests of the real torch-npu over the stand-in libraries: python -m tests.npu [pytest options].

Nothing here touches a device, and every line of output says so.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.npu.stand_in import build

LABEL = "emulated: "


def main() -> int:
    """pytest's exit status; 3 where torch-npu is not installed."""
    # Looking for the package does not import it: that would fail without the libraries.
    found = importlib.util.find_spec("torch_npu")
    if found is None or found.origin is None:
        print(f"{LABEL}torch-npu is not installed in {sys.prefix}: `make npu-contract` installs it")
        return 3
    with tempfile.TemporaryDirectory() as directory:
        libraries = Path(directory, "libraries")
        refused = build(Path(found.origin).parent, libraries)
        print(
            f"{LABEL}stand-in libraries built; {len(refused)} functions of CANN refused by name", flush=True
        )
        environ = os.environ | {
            "STAND_IN_LIBRARIES": str(libraries),
            "PYTHONUNBUFFERED": "1",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # of pytest's own process: the tests start others
        }
        command = [sys.executable, "-m", "pytest", "-m", "npu", "tests/npu", "-rA", *sys.argv[1:]]
        with subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as tests:
            for line in tests.stdout or ():
                print(LABEL + line, end="", flush=True)
    return tests.returncode


if __name__ == "__main__":
    sys.exit(main())
