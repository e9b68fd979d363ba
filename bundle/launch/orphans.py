"""No process outlives the one that started it, however that ends: the kernel kills it then.

On Linux; elsewhere a process learns nothing of the end of another. What the kernel waits for is the end of
the thread that started the process.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial

from bundle.errors import ExitCode
from bundle.launch import outcomes

_PR_SET_PDEATHSIG = 1


def prepare_parent_death_signal(number: int) -> Callable[[], object]:
    """What a process calls to get this signal when its parent ends.

    Loaded here, as `prepare_death_with_parent` is.
    """
    if sys.platform != "linux":
        return lambda: None
    return partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, number, 0, 0, 0)


def prepare_death_with_parent() -> Callable[[int], None]:
    """What a process calls with the number of its parent, to be killed with it: at once where it has ended.

    Loaded here, so that it can be called between fork and exec.
    """
    die_with_it = prepare_parent_death_signal(signal.SIGKILL)

    def bind(parent: int) -> None:
        die_with_it()
        if os.getppid() != parent:  # nobody will send the signal any more
            os._exit(ExitCode.TERMINATED)

    return bind


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent, torchrun's agent, dies: no rank stays as an orphan.

    Does nothing for a rank that torchrun did not start: its parent may be a shell that is meant to go away.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        folder = outcomes.get_launch_folder()
        agent = (folder / outcomes.AGENT_PID_FILE).read_text(encoding="utf-8") if folder else os.getppid()
        prepare_death_with_parent()(int(agent))


def kill_forks_on_exit() -> None:
    """Has what this process forks killed when it ends, and what that forks in turn: writers of checkpoints.

    What another thread than the main one forks is left alone: it would be killed at the end of that thread.
    """
    if sys.platform != "linux":
        return
    bind, forking = prepare_death_with_parent(), threading.local()

    def note_forking_process() -> None:
        forking.parent = os.getpid() if threading.get_native_id() == os.getpid() else None

    def bind_child() -> None:
        if forking.parent is not None:
            bind(forking.parent)

    os.register_at_fork(before=note_forking_process, after_in_child=bind_child)
