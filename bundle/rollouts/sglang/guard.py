"""Runs a module of SGLang so that it ends with the process that started it; runs as a script.

The first line on stdin is JSON: {"module", "arguments"}. So keys stand on no command line. Stdin stays open
while the other process lives: at its end this process and all that it has started are killed.
"""

import json
import os
import runpy
import signal
import sys
import threading


def end_with_parent(descriptor: int) -> None:
    """Kill the group of this process when the pipe closes."""
    while os.read(descriptor, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    with os.fdopen(os.dup(0), "rb", buffering=0) as pipe:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        job = json.loads(pipe.readline())
        threading.Thread(target=end_with_parent, args=(pipe.fileno(),), daemon=True).start()
        sys.argv = [job["module"], *job["arguments"]]
        runpy.run_module(job["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
