"""A probe that does what its word says."""

import os
import signal
import subprocess
import sys
import time

from bundle.preflight import ProbeResult


def main(does: str) -> None:
    if does == "sleep":
        time.sleep(600)
    if does == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if does == "leave":
        subprocess.Popen(["sleep", "100"])
        time.sleep(600)
    if does == "fail":
        raise RuntimeError("no such device")
    ProbeResult({"TFLOP/s": 1.0}, "it is wrong" if does == "wrong" else "").print_result()
    if does == "chatter":
        print("{}\nbye")


if __name__ == "__main__":
    main(sys.argv[1])
