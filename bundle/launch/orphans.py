"""The end of child processes with their parent, by a signal of the kernel, however the parent ends.

This works on Linux; elsewhere a process does not learn of the end of another. The signal comes at the end of
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
    """Return a function by which a process requests this signal for its parent's end.

    The C library is loaded here, as `prepare_death_with_parent` needs it.
    """
    if sys.platform != "linux":
        return lambda: None
    return partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, number, 0, 0, 0)


def prepare_death_with_parent() -> Callable[[int], None]:
    """Return a function that lets the kernel kill the calling process with its parent.

    The function takes the parent's process number, and ends the process at once where the parent has ended.
    The C library is loaded here, so the function can be called between fork and exec.
    """
    die_with_it = prepare_parent_death_signal(signal.SIGKILL)

    def bind(parent: int) -> None:
        die_with_it()
        if os.getppid() != parent:  # the parent is gone and no signal will come
            os._exit(ExitCode.TERMINATED)

    return bind


def die_with_torchrun_agent() -> None:
    """Let the kernel kill this rank when its parent, torchrun's agent, dies, so no rank is an orphan.

    Do nothing for a rank that torchrun did not start: its parent may be a shell that ends early by intent.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        folder = outcomes.get_launch_folder()
        agent = (folder / outcomes.AGENT_PID_FILE).read_text(encoding="utf-8") if folder else os.getppid()
        prepare_death_with_parent()(int(agent))


def bind_forks_to_parent_death() -> None:
    """Let the kernel kill forks of this process, and forks of these, when their parent ends.

    The forks are writers of checkpoints. Forks of other threads than the main one are left alone, as they
    would be killed at the end of that thread.
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
