"""A rank that ends when whoever started it ends; without torch, so that it can come first."""

import ctypes
import os
import signal
import sys

from bundle.errors import ExitCode
from bundle.launchers import outcomes

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent, torchrun's agent, dies: no rank stays as an orphan.

    Does nothing for a rank that torchrun did not start: its parent may be a shell that is meant to go away.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    folder = outcomes.directory()
    # The agent may have died before the line above: then nobody will send the signal any more.
    if folder and os.getppid() != int((folder / outcomes.AGENT).read_text(encoding="utf-8")):
        os._exit(ExitCode.TERMINATED)
