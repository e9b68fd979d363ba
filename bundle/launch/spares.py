"""Running a job on as many nodes as it needs of those that were started for it: the others are spare.

What a verdict says of its end decides what follows: the same nodes again, another in the place of one that is
lost or bad, or the end.
"""

import logging
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bundle.errors import ExitCode, JobFailed
from bundle.launch import nodes, outcomes
from bundle.launch.causes import Action, Kind
from bundle.launch.process import Ended, hearing
from bundle.launch.rendezvous import Rendezvous, own_address
from bundle.launch.roster import LOST_SECONDS, Roster, Round, Sign, resolved, upcoming
from bundle.launch.verdict import Verdict, mends

_log = logging.getLogger(__name__)

FOLDER = "roster"
_SLEEP_SECONDS = 0.1


class Spares:
    """This node among those that were started for a job, more of them by `spares` than it needs.

    `where`: where it stands among all of them; they meet in the run directory's logs. `wait`: seconds that
    the first round may take to come about; `most`: restarts in place without anything gained between.
    """

    def __init__(self, where: Rendezvous, spares: int, logs: Path, *, wait: float, most: int) -> None:
        self._where, self._nodes = where, where.nodes - spares
        self._wait, self._most = wait, most
        address = where.address if where.node_rank == 0 else own_address(where.address)
        self._roster = Roster(logs / FOLDER, where.node_rank, outcomes.node_name(), address)
        self._stopped: int | None = None

    def run(
        self,
        start: Callable[[Rendezvous, bool, Callable[[], None]], None],
        kept: Callable[[], object],
        unfit: str = "",
    ) -> None:
        """Returns when the job has ended well, be it without this node; raises Ended as it did otherwise.

        `start` runs the ranks of one round on this node: where it stands in that, whether it goes on with a
        round before it, and what is to be called every now and then. `kept` is what a restart goes on from,
        `unfit` why this node takes part in none.
        """
        left, before = self._most, kept()
        own: Verdict | None = None  # how this node's last round ended
        self._roster.say(out=unfit)
        try:
            while (seat := self._seat(own)) is not None:
                where, continues = seat
                self._roster.say(waits_for=None)
                try:
                    start(where, continues, self._roster.beat)
                    own = None
                    break
                except Ended as ended:
                    own = ended.verdict
                left, before = (self._most if kept() != before else left), kept()
                if own.action is Action.RESTART_WITHOUT:
                    bad = own.kind is not Kind.LOST_NODE and own.node_rank == where.node_rank
                    self._roster.say(out=own.sentence if bad else "")
                elif mends(own) and left:
                    left -= 1
                else:
                    raise Ended(own)
                _log.warning("%s", Ended(own))
            self._roster.say(ended=Verdict(ExitCode.OK).dump())
        except Ended as ended:
            self._roster.say(ended=ended.verdict.dump())
            raise

    def _seat(self, own: Verdict | None) -> tuple[Rendezvous, bool] | None:
        """This node's place in the next round that it takes part in; None once the job has ended well.

        `own` is how its last round ended. Raises Ended as the job did, and where there is no next round.
        """
        began, roster = time.monotonic(), self._roster
        with hearing(self._hear):
            while True:
                looked = roster.look()
                last = roster.round()
                if roster.own.waits_for is None or (last and last.number >= roster.own.waits_for):
                    if last and roster.own.waits_for is not None and roster.own.token in last.members:
                        return self._place(last), last.continues
                    roster.say(waits_for=(last.number if last else 0) + 1)
                roster.beat()
                if self._stopped is not None:
                    raise Ended(self._told(self._stopped, last))
                if looked and self._over(last, own, time.monotonic() - began):
                    return None
                time.sleep(_SLEEP_SECONDS)

    def _place(self, last: Round) -> Rendezvous:
        """This node's place in a round, whose members meet at the first. Raises JobFailed."""
        first = self._roster.entry(last.members[0])
        if first is None:
            raise JobFailed(f"{self._roster.folder}: what node {last.members[0]} said is no longer there")
        rank = last.members.index(self._roster.own.token)
        return self._where._replace(nodes=self._nodes, node_rank=rank, address=first.address)

    def _over(self, last: Round | None, own: Verdict | None, waited: float) -> bool:
        """Makes the next round where it can be; whether the job has ended well. Raises Ended."""
        roster, members = self._roster, last.members if last else ()
        ours, ends = roster.saw(members), roster.ends(members)
        lost = roster.lost(members)
        gone = lost | roster.ended(members)
        for token, code in ends.items():
            if code != ExitCode.OK and (verdict := roster.verdict(token)):
                raise Ended(verdict)
        alive = roster.alive()
        if ends and gone == set(members) - {roster.own.token}:
            if own is not None and not roster.own.out:
                raise Ended(own)
            return True
        # Far from being lost: one that went together with who is lost by now is not chosen.
        here = roster.alive(within=LOST_SECONDS / 3)
        if (coming := upcoming(last, here, gone, self._nodes, continues=ours)) is not None:
            roster.propose(coming)
            return False
        fit = [sign for sign in alive if not sign.out]
        if ours and resolved(last, alive, gone) and len(fit) < self._nodes:
            word = f"no word from {'it' if len(lost) == 1 else 'them'} for {LOST_SECONDS:.0f} s"
            named = roster.names(token for token in members if token in lost)
            raise Ended(own or nodes.lost([named], word))
        if not ours and len(alive) >= self._where.nodes and len(fit) < self._nodes:
            raise Ended(self._refused(alive))
        if not ours and waited > self._wait:
            raise Ended(self._alone(alive, waited))
        return False

    def _refused(self, alive: Sequence[Sign]) -> Verdict:
        """That too few of all nodes may take part."""
        every = sorted((sign.number, sign.token) for sign in alive if sign.out)
        entries = (self._roster.entry(token) for _, token in every)
        out = [f"{entry.name}: {entry.out}" for entry in entries if entry]
        cause = f"of {len(alive)} nodes {len(alive) - len(out)} may take part, and {self._nodes} are needed"
        return self._verdict(
            ExitCode.ENVIRONMENT_UNFIT, Kind.REFUSED, f"{cause}: {'; '.join(out)}", Action.STOP
        )

    def _alone(self, alive: Sequence[Sign], waited: float) -> Verdict:
        """That the other nodes did not come."""
        cause = (
            f"gave up: {len(alive)} of at least {self._nodes} nodes came to {self._roster.folder} within"
            f" {waited:.0f} s: start this command on each, with --node-rank 0 to {self._where.nodes - 1}, and"
            " see that all of them see that folder"
        )
        return self._verdict(ExitCode.LAUNCH_UNAVAILABLE, Kind.LAUNCH, cause, Action.RESTART)

    def _told(self, number: int, last: Round | None) -> Verdict:
        """That this node was told to end while no rank of it ran."""
        if last is not None and self._roster.saw(last.members):
            cause = "this node has no part in the job at present, and ends as told"
            return self._verdict(ExitCode.PREEMPTED, Kind.PREEMPTED, cause, Action.RESTART)
        code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.TERMINATED
        cause = f"ended by {signal.Signals(number).name} before all nodes were there"
        return self._verdict(code, Kind.STOPPED, cause, Action.RESTART)

    def _verdict(self, code: ExitCode, kind: Kind, cause: str, action: Action) -> Verdict:
        own = self._roster.own
        return Verdict(
            code, kind, cause, action, node=own.name, node_rank=own.number, nodes=self._where.nodes
        )

    def _hear(self, number: int, _: Any) -> None:
        self._stopped = number
