"""This node's ranks from their start by torchrun to their end.

A launch ends with one of our exit codes, and nothing that it started outlives it.
"""

import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bundle import files
from bundle.environment import machine
from bundle.environment.hardware import memory_kills
from bundle.errors import BundleError, EnvironmentUnfit, ExitCode, JobFailed
from bundle.launch import events, nodes, orphans, outcomes, output, verdict
from bundle.launch.command import Launch, command
from bundle.launch.evidence import KernelLog, gathered
from bundle.launch.hang import ENDED, Hung, state
from bundle.launch.rendezvous import Rendezvous
from bundle.launch.verdict import Verdict, judge

_log = logging.getLogger(__name__)

# An orchestrator wants the node back, the terminal went away, Ctrl-C: each is a request to save and stop.
_HEARD = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_LOOK_SECONDS = 0.5
# How long the other ranks of a failed job may take to end by themselves; torchrun would give them 30.
_GRACE_SECONDS = 5.0
# How long torchrun may take to end after its ranks, which were killed; the kernel may hold one of them.
_AFTER_KILL_SECONDS = 8.0
_FIRST_WORD_SECONDS = 10.0
# In /proc/PID/status: the signals that a process ignores, and those that it handles.
_HANDLED = re.compile(r"^Sig(?:Ign|Cgt):\s*([0-9a-f]+)$", re.MULTILINE)


class Ended(BundleError):
    """A launch that did not end with 0, with the code that its ranks agree on."""

    def __init__(self, ending: Verdict) -> None:
        super().__init__(ending.text())
        self.code, self.verdict = ending.code, ending


class Waiting:
    """The wait of one node of several for the others; a node that is alone waits for nobody."""

    def __init__(self, meeting: Rendezvous, folder: Path, limit: float) -> None:
        self._meeting, self._folder, self._limit = meeting, folder, limit
        self._began = time.monotonic()
        self._next_word = _FIRST_WORD_SECONDS
        self._over = meeting.nodes == 1

    @property
    def over(self) -> bool:
        """Whether this node's ranks have been started: torchrun makes their logs once all nodes have met."""
        self._over = self._over or any(self._folder.glob("*/attempt_*"))
        return self._over

    @property
    def too_long(self) -> bool:
        """Whether the others had their time."""
        return not self.over and self._seconds > self._limit

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def look(self) -> None:
        """Says on stderr what is waited for; every time after twice the time before."""
        if not self.over and self._seconds > self._next_word:
            _log.info("%s", self)
            self._next_word *= 2

    def __str__(self) -> str:
        m, others = self._meeting, self._meeting.nodes - 1
        return (
            f"node {m.node_rank} of {m.nodes} waits for the other {others} at {m.address}:{m.port}, for "
            f"{self._seconds:.0f} of at most {self._limit:.0f} s: start this command on each, with "
            f"--node-rank 0 to {others}, and see that the port of node 0 can be reached"
        )


def run(launch: Launch, inherited: Mapping[str, str], alive: Callable[[], None] = lambda: None) -> None:
    """Starts this node's ranks and returns when all ended well; calls `alive` every now and then until then.

    Of several nodes, each line that a rank prints is shown behind [node/rank]; beside events, on stderr.
    SIGTERM, SIGHUP and Ctrl-C have the ranks save and end with 75; the second of them ends all at once. While
    the other nodes are not there yet, the first ends this one. Raises Ended with the code and the cause.
    """
    folder = launch.logs
    try:
        folder.mkdir(parents=True)
        for name, text in launch.files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvironmentUnfit(
            f"cannot make the log folder {folder} and its files: {error.strerror}; name with --run-directory"
            " a place that this user may write to"
        ) from error
    kills = memory_kills(machine.local())
    waiting = Waiting(launch.rendezvous, folder, launch.wait)
    others = nodes.Others(folder, launch.rendezvous)
    torchrun = command(launch, inherited)
    variables = {outcomes.DIRECTORY: str(folder)} | ({events.VARIABLE: "1"} if launch.has_events else {})
    is_read = launch.has_events or launch.rendezvous.nodes > 1
    with (folder / "agent.log").open("wb") as log, ExitStack() as passed_on, closing(KernelLog()) as kernel:
        with _held_back():
            agent = subprocess.Popen(
                torchrun.argv,
                env=torchrun.environment(inherited) | variables,
                stdin=subprocess.DEVNULL,
                # The agent itself writes only to stderr; what is left of stdout is the first rank's.
                stdout=subprocess.PIPE if is_read else None,
                stderr=log,
                start_new_session=True,
                preexec_fn=_bind_to(os.getpid(), folder),
            )
            stopped = passed_on.enter_context(_signals(agent, folder, waiting))
        passed_on.enter_context(output.forward_lines(agent.stdout, _line_printer(launch)))
        watched = _watch(agent, folder, waiting, others, alive)
        ending = judge(
            gathered(
                folder,
                launch.rendezvous,
                launch.per_node,
                watched.status,
                stopped_by=stopped.get("by"),
                overdue=watched.overdue,
                elsewhere=others.ended,
                hung=watched.hung,
                gave_up=f"gave up: {waiting}" if waiting.too_long else "",
                kernel=kernel.lines(),
                memory_kills=memory_kills(machine.local()) > kills,
            )
        )
    try:
        ending = nodes.agreed(ending, outcomes.world(folder), alive=alive)
        verdict.write(folder, ending)
    except JobFailed as error:  # a full disk must not hide how the launch ended
        _log.warning("cannot write the verdict: %s", error)
    if ending.code != ExitCode.OK:
        raise Ended(ending)


def _line_printer(launch: Launch) -> Callable[[str], None]:
    """Return what shows a line of this node's first rank: behind its label, where there are several nodes."""
    node, before = launch.rendezvous.node_rank, ""
    if launch.rendezvous.nodes > 1:
        before = f"{output.label(node, node * launch.per_node)} "
    if launch.has_events:
        return partial(events.show_line, before=before)
    return lambda line: print(before + line, flush=True)


def _bind_to(parent: int, folder: Path) -> Callable[[], None]:
    """What the agent does before it becomes torchrun: it dies with us, and leaves SIGTERM to us."""
    die_with = orphans.binding()

    def bind() -> None:
        die_with(parent)
        # Ranks compare this with their parent, so that one whose agent died while it was starting ends too.
        (folder / outcomes.AGENT).write_text(str(os.getpid()), encoding="utf-8")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)

    return bind


class _Watched(NamedTuple):
    """How the agent ended, and whether that is of our doing: what outlived a failure, or hung, was killed."""

    status: int
    overdue: bool = False
    hung: bool = False


def _watch(
    agent: subprocess.Popen[bytes],
    folder: Path,
    waiting: Waiting,
    others: nodes.Others,
    alive: Callable[[], None],
) -> _Watched:
    """Returns when the agent has ended: ranks that outlive a failure too long, or hang, are killed.

    So are those that outlive the ranks of another node. An agent that has waited too long for the other nodes
    is killed as well, and one that outlives its ranks.
    """
    failed: float | None = None
    killed: float | None = None
    doing = _Watched(-signal.SIGKILL)
    hung = Hung(folder)
    while True:
        try:
            return doing._replace(status=agent.wait(timeout=_LOOK_SECONDS))
        except subprocess.TimeoutExpired:
            ranks = outcomes.read(folder)
        alive()
        waiting.look()
        if waiting.too_long:
            agent.kill()
        hung.look(ranks)
        now = time.monotonic()
        if failed is None and (any(map(_failed, ranks)) or others.look()):
            failed = now
        if not hung.overdue and (failed is None or now - failed <= _GRACE_SECONDS):
            continue
        if killed is None:  # what torchrun has seen by now is not our doing
            killed = now
            seen = verdict.saw_death((folder / "agent.log").read_text(errors="replace"))
            doing = doing._replace(overdue=not seen, hung=hung.overdue)
        for rank in ranks:
            _send(rank.pid, signal.SIGKILL)
        if now - killed > _AFTER_KILL_SECONDS:
            _let_go(agent, ranks)
            return doing


def _let_go(agent: subprocess.Popen[bytes], ranks: Sequence[outcomes.Outcome]) -> None:
    """Ends an agent that waits for ranks which the kernel holds; what cannot be ended is left, and named."""
    agent.kill()
    with suppress(subprocess.TimeoutExpired):
        agent.wait(_LOOK_SECONDS)
    for rank in ranks:
        if (why := state(rank.pid)) != ENDED:
            _log.warning("rank %d, process %d, was killed and does not end: %s", rank.rank, rank.pid, why)


def _failed(outcome: outcomes.Outcome) -> bool:
    if outcome.code is None:
        return not _send(outcome.pid, 0)
    return outcome.code not in (ExitCode.OK, ExitCode.PREEMPTED)


def _send(pid: int, number: int) -> bool:
    """Whether there was a process to send the signal to."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def _held_back() -> Iterator[None]:
    """What arrives inside is heard afterwards, when there is somebody to pass it on to."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _signals(agent: subprocess.Popen[bytes], folder: Path, waiting: Waiting) -> Iterator[dict[str, int]]:
    """Passes on the signals that this process gets; yields where the first of them is written down."""
    stopped: dict[str, int] = {}

    def stop(number: int, _: object) -> None:
        again = "by" in stopped
        stopped.setdefault("by", number)
        if again or not waiting.over or not _can_save(folder):
            # No more patience, or nothing to save. The ranks die with their agent, which writes no traceback.
            agent.kill()
        else:
            _request(folder)
            _log.info("asked to stop: saves after this step, and ends; asked again, it ends at once")

    with hearing(stop):
        yield stopped


@contextmanager
def hearing(handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Has `handler` called for each signal inside by which this process is asked to stop."""
    # Started by nohup, or in the background of a shell script, we are not to hear of it.
    heard = [number for number in _HEARD if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _can_save(folder: Path) -> bool:
    """Return whether no rank would end by a request to save; one that is not there yet finds it later."""
    running = [outcome.pid for outcome in outcomes.read(folder) if outcome.code is None]
    return not any(map(_ends_by_sigterm, running))


def _ends_by_sigterm(pid: int) -> bool:
    """Return whether a process neither handles nor ignores SIGTERM; False where nothing says so."""
    status = files.read(Path("/proc", str(pid), "status")) or ""
    masks = [int(mask, 16) for mask in _HANDLED.findall(status)]
    return bool(masks) and not any(mask >> (signal.SIGTERM - 1) & 1 for mask in masks)


def _request(folder: Path) -> None:
    """Asks every rank of this node to save and stop, those that are still starting too."""
    try:
        (folder / outcomes.STOP).touch()
    except OSError as error:
        _log.warning("cannot leave a request for ranks that are still starting: %s", error)
    for outcome in outcomes.read(folder):
        if outcome.code is None:
            _send(outcome.pid, signal.SIGTERM)
