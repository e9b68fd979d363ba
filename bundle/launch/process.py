"""This node's ranks, from their start by torchrun to their end.

A launch ends with one of our exit codes, and no process that it started outlives it.
"""

import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bundle import files
from bundle.environment import machine
from bundle.environment.hardware import count_oom_kills
from bundle.errors import BundleError, EnvironmentUnfit, ExitCode, JobFailed
from bundle.launch import events, nodes, orphans, outcomes, output, verdict
from bundle.launch.command import Launch, build_command
from bundle.launch.evidence import KernelLogTail, gather_evidence, read_tail
from bundle.launch.hang import PROCESS_ENDED, HangEvidenceCollector, describe_unresponsive_state
from bundle.launch.rendezvous import Rendezvous
from bundle.launch.storage import LogFileSystem
from bundle.launch.verdict import Verdict, judge

_log = logging.getLogger(__name__)

# An orchestrator needs the node, the terminal closed, Ctrl-C: each is a request to save and stop.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_POLL_SECONDS = 0.5
_MAX_OPEN_FILES = 1 << 20  # some programs go through all numbers up to the limit
# The time for the other ranks of a failed job to end by themselves; torchrun would give them 30 s.
_RANK_FAILURE_GRACE_SECONDS = 5.0
# The time for torchrun to end after its ranks were killed; the kernel may hold one of them.
_AGENT_EXIT_GRACE_SECONDS = 8.0
# The time for ranks to end after their agent was killed.
_ORPHAN_KILL_TIMEOUT_SECONDS = 5.0
_FIRST_RENDEZVOUS_REPORT_SECONDS = 10.0
# In /proc/PID/status: the signals that a process ignores, and those that it handles.
_IGNORED_OR_CAUGHT_MASK_PATTERN = re.compile(r"^Sig(?:Ign|Cgt):\s*([0-9a-f]+)$", re.MULTILINE)


class LaunchFailed(BundleError):
    """The error of a launch that did not end with 0, with the code that its ranks agree on.

    `is_stopped`: this process was asked to end after its ranks had ended, so it starts none again.
    """

    def __init__(self, launch_verdict: Verdict, *, is_stopped: bool = False) -> None:
        super().__init__(launch_verdict.to_text())
        self.code, self.verdict, self.is_stopped = launch_verdict.code, launch_verdict, is_stopped


class RendezvousWait:
    """The wait of one node for the others; a single node does not wait."""

    def __init__(self, rendezvous: Rendezvous, folder: Path, limit: float) -> None:
        self._rendezvous, self._folder, self._limit = rendezvous, folder, limit
        self._began = time.monotonic()
        self._next_report = _FIRST_RENDEZVOUS_REPORT_SECONDS
        self._is_over = rendezvous.nodes == 1
        self._failed_starts = nodes.PeerStartFailurePoller(folder, rendezvous)

    @property
    def has_met_all_nodes(self) -> bool:
        """True if this node's ranks have started: torchrun makes their logs once all nodes have met."""
        self._is_over = self._is_over or any(self._folder.glob("*/attempt_*"))
        return self._is_over

    def find_abort_reason(self) -> str:
        """Return why the wait is in vain: another node failed, or the limit is exceeded; else nothing."""
        if self.has_met_all_nodes:
            return ""
        if cause := self._failed_starts.poll():
            return cause
        return f"gave up: {self}" if self._elapsed_seconds > self._limit else ""

    @property
    def _elapsed_seconds(self) -> float:
        return time.monotonic() - self._began

    def log_missing_nodes_if_due(self) -> None:
        """Log which nodes are waited for; the interval doubles each time."""
        if not self.has_met_all_nodes and self._elapsed_seconds > self._next_report:
            _log.info("%s", self)
            self._next_report *= 2

    def __str__(self) -> str:
        m, other_nodes = self._rendezvous, self._rendezvous.nodes - 1
        return (
            f"node {m.node_rank} of {m.nodes} waits for the other {other_nodes} at {m.address}:{m.port},"
            f" for {self._elapsed_seconds:.0f} of at most {self._limit:.0f} s: start this command on each"
            f" node, with --node-rank 0 to {other_nodes}, and check that the port of node 0 can be reached"
        )


def run_ranks_once(
    launch: Launch, inherited: Mapping[str, str], send_heartbeat: Callable[[], None] = lambda: None
) -> None:
    """Start this node's ranks and return when all ended well.

    Call `send_heartbeat` at each poll until then.

    With several nodes, each line that a rank prints gets the prefix [node/rank]; with events, other lines go
    to stderr. At SIGTERM, SIGHUP or Ctrl-C the ranks save and end with 75; a second signal ends all ranks at
    once. While other nodes are missing, the first signal ends this node. Raise LaunchFailed with the code and
    the cause.
    """
    folder = launch.logs
    try:
        folder.mkdir(parents=True)
        for name, text in launch.files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvironmentUnfit(
            f"{folder}: the log folder cannot be written: {error.strerror}. Name a place that this user"
            " may write to with --run-directory"
        ) from error
    storage, local_folder = LogFileSystem(folder), outcomes.choose_disk_failure_folder()
    earlier_kills = count_oom_kills(machine.build_local_machine())
    node_wait = RendezvousWait(launch.rendezvous, folder, launch.wait)
    peers = nodes.PeerFailurePoll(folder, launch.rendezvous)
    torchrun = build_command(launch, inherited)
    variables = {outcomes.LAUNCH_FOLDER_VARIABLE: str(folder)} | (
        {events.LISTENER_FLAG_VARIABLE: "1"} if launch.has_events else {}
    )
    if local_folder is not None:
        variables[outcomes.FALLBACK_FOLDER_VARIABLE] = str(local_folder)
    is_read = launch.has_events or launch.rendezvous.nodes > 1
    with (
        (folder / "agent.log").open("wb") as log,
        ExitStack() as passed_on,
        closing(KernelLogTail()) as kernel,
    ):
        if launch.rendezvous.nodes == 1:  # else torchrun leaves the file of its store behind
            variables["PET_RDZV_ENDPOINT"] = str(
                Path(passed_on.enter_context(_create_temporary_directory()), "store")
            )
        with _block_stop_signals():
            agent = subprocess.Popen(
                torchrun.argv,
                env=torchrun.build_environment(inherited) | variables,
                stdin=subprocess.DEVNULL,
                # The agent writes only to stderr; stdout has only lines of the first rank.
                stdout=subprocess.PIPE if is_read else None,
                stderr=log,
                start_new_session=True,
                preexec_fn=_build_agent_preexec(os.getpid(), folder),
            )
            stop_signal = passed_on.enter_context(_request_stop_on_signal(agent, folder, node_wait))
        passed_on.enter_context(output.forward_lines(agent.stdout, _build_first_rank_printer(launch)))
        agent_exit = _supervise_agent(
            agent, folder, local_folder, launch.rendezvous, node_wait, peers, send_heartbeat
        )
        if agent_exit.status < 0:
            _kill_orphaned_ranks(outcomes.read(folder, local_folder))
        launch_verdict = judge(
            gather_evidence(
                folder,
                launch.rendezvous,
                launch.per_node,
                agent_exit.status,
                stop_signal=stop_signal.get("by"),
                has_killed_ranks=agent_exit.has_killed_ranks,
                has_failed_elsewhere=peers.has_failed_peer,
                has_hung=agent_exit.has_hung,
                wait_failure=agent_exit.wait_failure,
                kernel_lines=kernel.read_new_lines(),
                has_memory_kills=count_oom_kills(machine.build_local_machine()) > earlier_kills,
                agent_pid=agent.pid,
                storage_failure=storage.find_write_failure() if agent_exit.status else "",
                local_folder=local_folder,
            )
        )
    world, late_signals = outcomes.read_world_folder_path(folder), list[int]()
    try:
        if not node_wait.has_met_all_nodes and not agent_exit.wait_failure and not stop_signal:
            nodes.write_failed_start_verdict(folder, launch.rendezvous, launch_verdict)
        # A scheduler that ends the job for a lost node must not end this process before its verdict.
        with handle_stop_signals(lambda number, _: late_signals.append(number)):
            launch_verdict = nodes.agree_on_verdict(
                launch_verdict, world, send_heartbeat=send_heartbeat, is_stopped=lambda: bool(late_signals)
            )
            verdict.write(folder, launch_verdict)
        if local_folder is not None:
            shutil.rmtree(local_folder, ignore_errors=True)
    except (JobFailed, OSError) as error:  # a failed disk must not hide how the launch ended
        _log.warning("cannot write the verdict: %s", error)
        with suppress(JobFailed):
            place = outcomes.write_on_any_disk(verdict.FILE_NAME, launch_verdict.dump(), folder, local_folder)
            _log.warning("the verdict is in %s on %s", place, outcomes.get_node_name())
    if launch_verdict.code != ExitCode.OK:
        raise LaunchFailed(launch_verdict, is_stopped=bool(late_signals))


def _create_temporary_directory() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="mcore-bundle-")
    except OSError as error:
        raise EnvironmentUnfit(
            f"TMPDIR: {error.strerror}. Set it to a directory that this user may write to"
        ) from error


def _build_first_rank_printer(launch: Launch) -> Callable[[str], None]:
    """Return the function that shows a line of this node's first rank.

    The line gets its label where there are several nodes.
    """
    node, prefix = launch.rendezvous.node_rank, ""
    if launch.rendezvous.nodes > 1:
        prefix = f"{output.format_label(node, node * launch.per_node)} "
    if launch.has_events:
        return partial(events.print_event_or_log_line, prefix=prefix)
    return lambda line: print(prefix + line, flush=True)


def _build_agent_preexec(parent: int, folder: Path) -> Callable[[], None]:
    """Return the function that the agent calls before it becomes torchrun.

    The agent then dies with us, and ignores SIGTERM. Its limit of open files becomes the hard limit: the
    first agent has a connection from each rank and agent of the job.
    """
    die_with = orphans.prepare_death_with_parent()

    def bind() -> None:
        die_with(parent)
        soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        open_files = max(soft_limit, min(hard_limit, _MAX_OPEN_FILES))
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, hard_limit))
        # Ranks compare this with their parent, so a rank whose agent died during its start ends too.
        (folder / outcomes.AGENT_PID_FILE).write_text(str(os.getpid()), encoding="utf-8")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)

    return bind


class _AgentExit(NamedTuple):
    """The end of the agent, and whether we caused it by killing ranks that outlived a failure, or hung."""

    status: int
    has_killed_ranks: bool = False
    has_hung: bool = False
    wait_failure: str = ""


def _supervise_agent(
    agent: subprocess.Popen[bytes],
    folder: Path,
    local_folder: Path | None,
    rendezvous: Rendezvous,
    node_wait: RendezvousWait,
    peers: nodes.PeerFailurePoll,
    send_heartbeat: Callable[[], None],
) -> _AgentExit:
    """Wait until the agent has ended; kill ranks that outlive a failure too long, or hang.

    Ranks that outlive those of another node are killed as well. So is an agent that waits for other nodes in
    vain, or that outlives its ranks.
    """
    failed_at: float | None = None
    killed_at: float | None = None
    agent_exit = _AgentExit(-signal.SIGKILL)
    hang_responder = HangEvidenceCollector(folder, rendezvous)
    known_ranks: dict[int, outcomes.RankState] = {}  # a disk that fails hides them
    while True:
        try:
            return agent_exit._replace(status=agent.wait(timeout=_POLL_SECONDS))
        except subprocess.TimeoutExpired:
            known_ranks |= {outcome.rank: outcome for outcome in outcomes.read(folder, local_folder)}
            ranks = list(known_ranks.values())
        send_heartbeat()
        node_wait.log_missing_nodes_if_due()
        if wait_failure := node_wait.find_abort_reason():
            agent.kill()
            agent_exit = agent_exit._replace(wait_failure=wait_failure)
        hang_responder.poll_and_write_snapshots(ranks)
        now = time.monotonic()
        if failed_at is None and (any(map(_has_died_or_failed, ranks)) or peers.has_failed_peer_after_poll()):
            failed_at = now
        if not hang_responder.is_rank_exit_overdue and (
            failed_at is None or now - failed_at <= _RANK_FAILURE_GRACE_SECONDS
        ):
            continue
        if killed_at is None:  # deaths that torchrun has seen by now are not caused by us
            killed_at = now
            has_seen_death = verdict.has_seen_death(read_tail(folder / "agent.log"))
            agent_exit = agent_exit._replace(
                has_killed_ranks=not has_seen_death, has_hung=hang_responder.is_rank_exit_overdue
            )
        for rank in ranks:
            _send_signal(rank.pid, signal.SIGKILL)
        if now - killed_at > _AGENT_EXIT_GRACE_SECONDS:  # the agent waits for ranks which the kernel holds
            agent.kill()
            with suppress(subprocess.TimeoutExpired):
                agent.wait(_POLL_SECONDS)
            return agent_exit


def _kill_orphaned_ranks(ranks: Sequence[outcomes.RankState]) -> None:
    """Kill ranks whose agent was killed, and wait for their end; log those that do not end."""
    deadline = time.monotonic() + _ORPHAN_KILL_TIMEOUT_SECONDS
    remaining = [rank for rank in ranks if rank.code is None]
    while remaining := [rank for rank in remaining if describe_unresponsive_state(rank.pid) != PROCESS_ENDED]:
        if time.monotonic() > deadline:
            break
        for rank in remaining:
            _send_signal(rank.pid, signal.SIGKILL)
        time.sleep(_ORPHAN_KILL_TIMEOUT_SECONDS / 100)
    for rank in remaining:
        process_state = describe_unresponsive_state(rank.pid)
        _log.warning(
            "rank %d, process %d, was killed but does not end: %s", rank.rank, rank.pid, process_state
        )


def _has_died_or_failed(outcome: outcomes.RankState) -> bool:
    if outcome.code is None:
        return not _send_signal(outcome.pid, 0)
    return outcome.code not in (ExitCode.OK, ExitCode.PREEMPTED)


def _send_signal(pid: int, number: int) -> bool:
    """Send a signal to a process and return whether there was such a process."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def _block_stop_signals() -> Iterator[None]:
    """Block stop signals within the context; they arrive afterwards, when they can be forwarded."""
    earlier_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier_mask)


@contextmanager
def _request_stop_on_signal(
    agent: subprocess.Popen[bytes], folder: Path, node_wait: RendezvousWait
) -> Iterator[dict[str, int]]:
    """Forward stop signals within the context; yield the dictionary that gets the first as "by"."""
    first_signal: dict[str, int] = {}

    def stop(number: int, _: object) -> None:
        is_repeated = "by" in first_signal
        first_signal.setdefault("by", number)
        if is_repeated or not node_wait.has_met_all_nodes or not _can_ranks_survive_sigterm(folder):
            # A second request, or nothing to save. The ranks die with their agent, which writes no traceback.
            agent.kill()
        else:
            _stop_ranks_gracefully(folder)
            _log.info("stop requested: saves after this step and ends; a second request ends at once")

    with handle_stop_signals(stop):
        yield first_signal


@contextmanager
def handle_stop_signals(handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Call `handler` for each stop signal that this process gets within the context."""
    # A signal that is ignored, as under nohup or in the background of a shell script, stays ignored.
    numbers = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    earlier_handlers = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in earlier_handlers.items():
            signal.signal(number, previous)


def _can_ranks_survive_sigterm(folder: Path) -> bool:
    """Return whether no running rank would be ended by a request to save.

    A rank that has not started yet finds the request later.
    """
    running = [outcome.pid for outcome in outcomes.read(folder) if outcome.code is None]
    return not any(map(_ends_by_sigterm, running))


def _ends_by_sigterm(pid: int) -> bool:
    """Return whether a process neither handles nor ignores SIGTERM; False where it is unknown."""
    status = files.read_text_if_small(Path("/proc", str(pid), "status")) or ""
    masks = [int(mask, 16) for mask in _IGNORED_OR_CAUGHT_MASK_PATTERN.findall(status)]
    return bool(masks) and not any(mask >> (signal.SIGTERM - 1) & 1 for mask in masks)


def _stop_ranks_gracefully(folder: Path) -> None:
    """Ask every rank of this node to save and stop, also those that are still starting."""
    try:
        (folder / outcomes.STOP_FILE).touch()
    except OSError as error:
        _log.warning("cannot write the stop request for ranks that are still starting: %s", error)
    for outcome in outcomes.read(folder):
        if outcome.code is None:
            _send_signal(outcome.pid, signal.SIGTERM)
