"""Runs a job on as many of the started nodes as it needs; the others are spare nodes.

The verdict on a round decides what follows. The same nodes start again, another node replaces a lost or bad
one, or the job ends.
"""

import logging
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bundle.errors import ExitCode, JobFailed
from bundle.launch import nodes, outcomes
from bundle.launch.causes import FailureKind, RestartAction
from bundle.launch.node_registry import (
    LOST_SECONDS,
    Heartbeat,
    NodeRegistry,
    Round,
    get_running_lost_seconds,
    has_no_running_members,
    plan_next_round,
)
from bundle.launch.process import LaunchFailed, handle_stop_signals
from bundle.launch.rendezvous import Rendezvous, find_own_address
from bundle.launch.verdict import Verdict, is_restartable_in_place

_log = logging.getLogger(__name__)

NODE_REGISTRY_FOLDER = "roster"
_SLEEP_SECONDS = 0.1


class NodeRunnerWithSpares:
    """This node among those that were started for a job: `spares` more than the job needs.

    `rendezvous` is its place among all of them; they meet in the run directory's logs. `wait` is the limit
    for the first round to begin [s]. `most_restarts` limits restarts in place without progress.
    """

    def __init__(
        self, rendezvous: Rendezvous, spares: int, logs: Path, *, wait: float, most_restarts: int
    ) -> None:
        self._rendezvous, self._nodes = rendezvous, rendezvous.nodes - spares
        self._wait, self._most_restarts = wait, most_restarts
        address = rendezvous.address if rendezvous.node_rank == 0 else find_own_address(rendezvous.address)
        self._registry = NodeRegistry(
            logs / NODE_REGISTRY_FOLDER, rendezvous.node_rank, outcomes.get_node_name(), address
        )
        self._stop_signal: int | None = None

    def run(
        self,
        start: Callable[[Rendezvous, bool, Callable[[], None]], None],
        get_progress: Callable[[], object],
        unfit: str = "",
    ) -> None:
        """Run this node's part of the job and return when the job has ended well, even without this node.

        `start` runs the ranks of one round on this node. Its arguments are the place in the round, whether
        the round continues an earlier one, and a function to call at each poll. `get_progress` names the
        state that a restart continues from. `unfit` is the reason why this node takes part in no round. Raise
        LaunchFailed where the job fails.
        """
        remaining, last_progress = self._most_restarts, get_progress()
        last_verdict: Verdict | None = None  # the verdict on this node's last round
        self._registry.update_entry(out=unfit)
        try:
            while (placement := self._wait_to_join_round(last_verdict)) is not None:
                rendezvous, continues = placement
                self._registry.update_entry(waits_for=None)
                try:
                    start(rendezvous, continues, self._registry.send_heartbeat_if_due)
                    last_verdict = None
                    break
                except LaunchFailed as failure:
                    if failure.is_stopped:
                        raise
                    last_verdict = failure.verdict
                remaining, last_progress = (
                    (self._most_restarts if get_progress() != last_progress else remaining),
                    get_progress(),
                )
                if last_verdict.action is RestartAction.RESTART_WITHOUT:
                    is_bad = (
                        last_verdict.kind is not FailureKind.LOST_NODE
                        and last_verdict.node_rank == rendezvous.node_rank
                    )
                    self._registry.update_entry(out=last_verdict.sentence if is_bad else "")
                elif is_restartable_in_place(last_verdict) and remaining:
                    remaining -= 1
                else:
                    raise LaunchFailed(last_verdict)
                _log.warning("%s", LaunchFailed(last_verdict))
            self._registry.update_entry(ended=Verdict(ExitCode.OK).dump())
        except LaunchFailed as failure:
            self._registry.update_entry(ended=failure.verdict.dump())
            raise

    def _wait_to_join_round(self, last_verdict: Verdict | None) -> tuple[Rendezvous, bool] | None:
        """Return this node's place in the next round that it takes part in; None once the job ended well.

        `last_verdict` is the verdict on its last round. Raise LaunchFailed where the job failed or no round
        can follow.
        """
        began, registry = time.monotonic(), self._registry
        with handle_stop_signals(self._record_signal):
            while True:
                has_polled = registry.poll_if_due()
                last = registry.read_newest_round()
                if registry.own_entry.waits_for is None or (
                    last and last.number >= registry.own_entry.waits_for
                ):
                    if (
                        last
                        and registry.own_entry.waits_for is not None
                        and registry.own_entry.token in last.members
                    ):
                        return self._build_newest_round_rendezvous(last), last.continues
                    registry.update_entry(waits_for=(last.number if last else 0) + 1)
                registry.send_heartbeat_if_due()
                if self._stop_signal is not None:
                    raise LaunchFailed(self._build_idle_signal_verdict(self._stop_signal, last))
                if has_polled and self._has_ended_else_begin_round(
                    last, last_verdict, time.monotonic() - began
                ):
                    return None
                time.sleep(_SLEEP_SECONDS)

    def _build_newest_round_rendezvous(self, last: Round) -> Rendezvous:
        """Return this node's place in a round, whose members meet at the first. Raise JobFailed."""
        first = self._registry.read_entry(last.members[0])
        if first is None:
            raise JobFailed(f"{self._registry.folder}: the file of node {last.members[0]} is gone")
        rank = last.members.index(self._registry.own_entry.token)
        return self._rendezvous._replace(nodes=self._nodes, node_rank=rank, address=first.address)

    def _has_ended_else_begin_round(
        self, last: Round | None, last_verdict: Verdict | None, waited: float
    ) -> bool:
        """Make the next round where it can begin, and return whether the job has ended well.

        Raise LaunchFailed where the job failed or no round can follow.
        """
        registry, members = self._registry, last.members if last else ()
        is_own_start, exit_codes = (
            registry.has_any_heartbeat_since_start(members),
            registry.find_newly_recorded_exit_codes(members),
        )
        lost = registry.find_lost_nodes(members)
        gone = lost | registry.find_ended_nodes(members)
        for token, code in exit_codes.items():
            if code != ExitCode.OK and (verdict := registry.read_peer_verdict(token)):
                raise LaunchFailed(verdict)
        live_nodes = registry.find_live_nodes()
        if exit_codes and gone == set(members) - {registry.own_entry.token}:
            if last_verdict is not None and not registry.own_entry.out:
                raise LaunchFailed(last_verdict)
            return True
        # Only nodes with a recent heartbeat: a node that vanished together with a lost one is not chosen.
        recently_alive = registry.find_live_nodes(within=LOST_SECONDS / 3)
        if (
            next_round := plan_next_round(last, recently_alive, gone, self._nodes, continues=is_own_start)
        ) is not None:
            registry.create_round_if_absent(next_round)
            return False
        fit = [heartbeat for heartbeat in live_nodes if not heartbeat.is_excluded]
        if is_own_start and has_no_running_members(last, live_nodes, gone) and len(fit) < self._nodes:
            reason = f"no heartbeat for {get_running_lost_seconds(self._rendezvous.nodes):.0f} s"
            lost_names = registry.format_names(token for token in members if token in lost)
            raise LaunchFailed(last_verdict or nodes.build_lost_node_verdict([lost_names], reason))
        if not is_own_start and len(live_nodes) >= self._rendezvous.nodes and len(fit) < self._nodes:
            raise LaunchFailed(self._build_unfit_nodes_verdict(live_nodes))
        if not is_own_start and waited > self._wait:
            raise LaunchFailed(self._build_timeout_verdict(live_nodes, waited))
        return False

    def _build_unfit_nodes_verdict(self, live_nodes: Sequence[Heartbeat]) -> Verdict:
        """Return the verdict that too few of all nodes may take part."""
        excluded = sorted(
            (heartbeat.number, heartbeat.token) for heartbeat in live_nodes if heartbeat.is_excluded
        )
        entries = (self._registry.read_entry(token) for _, token in excluded)
        reasons = [f"{entry.name}: {entry.out}" for entry in entries if entry]
        cause = (
            f"only {len(live_nodes) - len(reasons)} of {len(live_nodes)} nodes are fit, but the job needs"
            f" {self._nodes}"
        )
        return self._build_local_verdict(
            ExitCode.ENVIRONMENT_UNFIT,
            FailureKind.REFUSED,
            f"{cause}: {'; '.join(reasons)}",
            RestartAction.STOP,
        )

    def _build_timeout_verdict(self, live_nodes: Sequence[Heartbeat], waited: float) -> Verdict:
        """Return the verdict that the other nodes did not come."""
        cause = (
            f"gave up: {len(live_nodes)} of at least {self._nodes} nodes registered in"
            f" {self._registry.folder} within {waited:.0f} s: start this command on each node, with"
            f" --node-rank 0 to {self._rendezvous.nodes - 1}, and check that all of them see that folder"
        )
        return self._build_local_verdict(
            ExitCode.LAUNCH_UNAVAILABLE, FailureKind.LAUNCH, cause, RestartAction.RESTART
        )

    def _build_idle_signal_verdict(self, signal_number: int, last: Round | None) -> Verdict:
        """Return the verdict that this node was told to end while none of its ranks ran."""
        if last is not None and self._registry.has_any_heartbeat_since_start(last.members):
            cause = "this spare node is not in use now, and ends as requested"
            return self._build_local_verdict(
                ExitCode.PREEMPTED, FailureKind.PREEMPTED, cause, RestartAction.RESTART
            )
        code = ExitCode.INTERRUPTED if signal_number == signal.SIGINT else ExitCode.TERMINATED
        cause = f"ended by {signal.Signals(signal_number).name} before all nodes had joined"
        return self._build_local_verdict(code, FailureKind.STOPPED, cause, RestartAction.RESTART)

    def _build_local_verdict(
        self, code: ExitCode, kind: FailureKind, cause: str, action: RestartAction
    ) -> Verdict:
        entry = self._registry.own_entry
        return Verdict(
            code, kind, cause, action, node=entry.name, node_rank=entry.number, nodes=self._rendezvous.nodes
        )

    def _record_signal(self, number: int, _: Any) -> None:
        self._stop_signal = number
