"""The verdict of a launch: what broke, on which rank and node, by which evidence, and whether to start again.

Rules and no model: a pure function of what was gathered. One JSON and one sentence.
"""

import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from bundle import files
from bundle.errors import ExitCode
from bundle.launch import causes, hang, outcomes, output
from bundle.launch.causes import SECONDARY, Action, Kind
from bundle.launch.evidence import Evidence
from bundle.launch.outcomes import Outcome

NAME = "verdict.json"
FORMAT = "mcore-bundle verdict"
# What a rank says only when it knows the cause, and that no restart mends; by the strength of the word.
_REFUSALS = (ExitCode.USAGE, ExitCode.ENVIRONMENT_UNFIT, ExitCode.PATCHES)
_NO_FAILURE = (None, ExitCode.OK, ExitCode.PREEMPTED)
_FIRST_DEATH = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+).*")
_TAIL_LINES = 15
_LONGEST = 600
# A line of the warnings module, and the source line that it shows.
_WARNING = re.compile(r"^\S+:\d+: \w*Warning: .*\n(?:[ \t]+\S.*\n?)?", re.MULTILINE)
_KILLED = "killed by SIGKILL: by somebody, or by the kernel when memory ran out (`dmesg` says so)"
_SHORT_OF_MEMORY = (
    "killed by SIGKILL while the kernel ended processes for want of memory: give the container more, or lower"
    " train.micro_batch_size or the ranks of a node"
)
_AFTER = {
    Action.NONE: "",
    Action.RESTART: "; the same command goes on after the last checkpoint",
    Action.RESTART_WITHOUT: "; restart without {node}",
    Action.STOP: "; a restart does not mend this",
}


@dataclass(frozen=True)
class Verdict:
    """How a launch ended: its exit code, what broke, where, why we believe it, and what to do.

    `cause` is one line; `details` are lines for a person, beside it. `rank` is None where it is about none.
    `silent`: nodes that had said nothing of their own end when this was told.
    """

    code: ExitCode
    kind: Kind = Kind.NOTHING
    cause: str = ""
    action: Action = Action.NONE
    rank: int | None = None
    node: str = ""
    node_rank: int = 0
    nodes: int = 1
    device: str | None = None
    evidence: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """What broke, on which rank and node, and whether to start again."""
        if self.kind in (Kind.NOTHING, Kind.PREEMPTED, Kind.STOPPED):
            return self.cause
        if self.kind is Kind.HANG:  # which is about several ranks, and names them
            return f"{self.cause}{_AFTER[self.action]}"
        where = [] if self.rank is None else [f"rank {self.rank}"]
        where += [self.node] if self.nodes > 1 and self.node else []
        device = f", {self.device}" if self.device else ""
        who = f"{' on '.join(where)}{device}: " if where else ""
        if (self.kind, self.action) == (Kind.LAUNCH, Action.RESTART):
            return f"{who}{self.cause}; the same command tries again"
        return f"{who}{self.cause}{_AFTER[self.action].format(node=self.node)}"

    def text(self) -> str:
        """What a person is told: the details, and the sentence at the end."""
        return "\n".join([*self.details, self.sentence])

    def dump(self) -> dict[str, Any]:
        """The values of its JSON."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {"format": FORMAT, **values, "code": int(self.code), "sentence": self.sentence}


def write(folder: Path, of: Verdict) -> None:
    """Puts a verdict into the log folder of its launch. Raises JobFailed where nothing can be written."""
    files.write_json(folder / NAME, of.dump())


def parse(values: Mapping[str, Any]) -> Verdict:
    """The verdict that `Verdict.dump` made these JSON values of."""
    kept = {each.name: values[each.name] for each in fields(Verdict)}
    kept |= {"code": ExitCode(kept["code"]), "kind": Kind(kept["kind"]), "action": Action(kept["action"])}
    return Verdict(**kept | {name: tuple(kept[name]) for name in ("evidence", "details", "silent")})


def judge(of: Evidence) -> Verdict:
    """The verdict of a launch on one node: of who knows what is wrong, and only then of who merely broke."""
    found = _judged(of)
    return replace(found, evidence=(*found.evidence, *(f"before: {what}" for what in of.noticed)))


def _judged(of: Evidence) -> Verdict:
    ended = sorted((o for o in of.outcomes if o.code), key=lambda o: (not o.explained, o.time))
    if of.status == 0:  # which is also how ranks end that have saved and stopped
        return _preempted(of, ended) or _said(of, ExitCode.OK)
    if of.gave_up:
        return _said(of, ExitCode.LAUNCH_UNAVAILABLE, Kind.LAUNCH, of.gave_up, Action.RESTART)
    for known in (_refused, _preempted, _by_kernel, _hung, _unreachable, _stopped):
        if (verdict := known(of, ended)) is not None:
            return verdict
    broken = sorted(_broken(of, ended), key=lambda verdict: strength(verdict.kind))
    return broken[0] if broken else _not_started(of)


def saw_death(agent: str) -> bool:
    """Whether torchrun, by what it wrote, has seen a rank end."""
    return _FIRST_DEATH.search(agent) is not None


def strength(kind: Kind) -> int:
    """0 for what can only be a cause; more for what may be the echo of one."""
    return SECONDARY.index(kind) + 1 if kind in SECONDARY else 0


def mends(of: Verdict) -> bool:
    """Whether the same ranks may get further on the same nodes: nobody had them stopped, no node is bad."""
    return of.action is Action.RESTART and of.kind not in (Kind.PREEMPTED, Kind.STOPPED, Kind.LAUNCH)


def _said(
    of: Evidence,
    code: ExitCode,
    kind: Kind = Kind.NOTHING,
    cause: str = "",
    action: Action = Action.NONE,
    **more: Any,
) -> Verdict:
    return Verdict(code, kind, cause, action, node=of.node, node_rank=of.node_rank, nodes=of.nodes, **more)


def _of_rank(
    of: Evidence,
    outcome: Outcome,
    kind: Kind,
    action: Action,
    cause: str = "",
    *,
    evidence: tuple[str, ...] = (),
    details: tuple[str, ...] = (),
) -> Verdict:
    """The verdict about one rank; without a `cause`, in the rank's own words."""
    words, message = _folded(outcome.message), outcome.message.rstrip().splitlines()
    said = (f"{_name(outcome)}: {words}",) if words else ()
    # What does not fit into one line is shown above it.
    whole = (f"{_name(outcome)}: {message[0]}", *message[1:]) if len(message) > 1 else ()
    return _said(
        of,
        ExitCode(outcome.code) if outcome.code not in _NO_FAILURE else ExitCode.JOB_FAILED,
        kind,
        cause or words,
        action,
        rank=outcome.rank,
        evidence=(*evidence, *said),
        details=(*whole, *details),
    )


def _refused(of: Evidence, ended: list[Outcome]) -> Verdict | None:
    said = [outcome for outcome in ended if outcome.code in _REFUSALS]
    return _of_rank(of, said[0], Kind.REFUSED, Action.STOP) if said else None


def _preempted(of: Evidence, ended: list[Outcome]) -> Verdict | None:
    saved = [outcome for outcome in ended if outcome.code == ExitCode.PREEMPTED]
    if not saved or any(o.code not in (ExitCode.OK, ExitCode.PREEMPTED, None) for o in of.outcomes):
        return None
    return _said(of, ExitCode.PREEMPTED, Kind.PREEMPTED, saved[0].message, Action.RESTART)


def _by_kernel(of: Evidence, _: list[Outcome]) -> Verdict | None:
    """What the kernel says of a device or of memory, where nobody had us stopped."""
    pids = {outcome.pid: outcome.rank for outcome in of.outcomes}
    for line in of.kernel if of.stopped_by is None else ():
        if (hit := causes.found(causes.KERNEL, line)) is None:
            continue
        named = hit.match.groupdict()
        rank = pids.get(int(named.get("pid") or 0))
        if rank is None and hit.rule.kind is Kind.HOST_MEMORY:
            continue  # a process of somebody else
        device = named.get("device")
        return _said(
            of,
            ExitCode.JOB_FAILED,
            hit.rule.kind,
            hit.says,
            hit.rule.action,
            rank=rank,
            device=f"PCI {device}" if device else None,
            evidence=(f"kernel: {hit.line}",),
        )
    return None


def _hung(of: Evidence, ended: list[Outcome]) -> Verdict | None:
    said = [outcome for outcome in ended if outcome.code == ExitCode.HANG]
    if not said:
        return None
    if not of.standings:
        silent = [outcome.rank for outcome in of.outcomes if outcome.code is None]
        stuck = f"; no word from {outcomes.spelled(silent)}" if silent else ""
        return _of_rank(of, said[0], Kind.HANG, Action.RESTART, f"{_name(said[0])}: {said[0].message}{stuck}")
    text, rank = hang.statement(of.standings)
    longest = max(of.standings, key=lambda standing: standing.seconds)
    since = f" for {longest.seconds:.0f} s" if longest.seconds else ""  # ranks know, and none may have said
    cause = f"no progress{since}: {text}"
    found = _of_rank(of, said[0], Kind.HANG, Action.RESTART, cause)
    of_it = [standing for standing in of.standings if standing.rank == rank]
    return replace(
        found,
        rank=rank,
        node=of_it[0].node if of_it else found.node,
        evidence=tuple(f"rank {standing.rank} on {standing.node}: {standing}" for standing in of.standings),
    )


def _unreachable(of: Evidence, ended: list[Outcome]) -> Verdict | None:
    said = [outcome for outcome in ended if outcome.code == ExitCode.LAUNCH_UNAVAILABLE]
    return _of_rank(of, said[0], Kind.LAUNCH, Action.RESTART) if said else None


def _stopped(of: Evidence, _: list[Outcome]) -> Verdict | None:
    if of.stopped_by is None:
        return None
    code = ExitCode.INTERRUPTED if of.stopped_by == signal.SIGINT else ExitCode.TERMINATED
    cause = f"ended by {_signal_name(of.stopped_by)} before a checkpoint was complete"
    return _said(of, code, Kind.STOPPED, cause, Action.RESTART)


def _broken(of: Evidence, ended: list[Outcome]) -> Iterator[Verdict]:
    """What each rank that broke is a case of, the likeliest to be the first before the others."""
    if of.overdue and of.elsewhere and not ended:
        cause = "its launcher ended its ranks, since another node had ended without them"
        yield _said(of, ExitCode.JOB_FAILED, Kind.ECHO, cause, Action.RESTART)
        return
    ranks = {outcome.local_rank: outcome for outcome in of.outcomes}
    order = [outcome.local_rank for outcome in ended if outcome.code != ExitCode.PREEMPTED]
    first, code = _FIRST_DEATH.search(of.agent), 0
    if first:
        code, local = int(first[1]), int(first[2])
        # torchrun names the rank whose death it saw first, which is the cause when that death was a signal.
        ours = of.overdue and code == -signal.SIGKILL and order
        order = [local, *order] if code < 0 and not ours else [*order, local]
        ranks.setdefault(local, Outcome(of.node_rank * of.per_node + local, local, 0, 0.0))
    elif not order:
        order = [outcome.local_rank for outcome in of.outcomes if outcome.code is None][:1]
    for each in dict.fromkeys(order):
        if ranks[each].code:
            yield _spoken(of, ranks[each])
        else:
            yield _silent(of, ranks[each], first)


def _spoken(of: Evidence, outcome: Outcome) -> Verdict:
    """What a rank that wrote down its end is a case of: an error that we explain keeps its own words."""
    where = _where(of, outcome)
    if (hit := causes.found(causes.RANK, outcome.message)) is None:
        return _of_rank(of, outcome, Kind.EXCEPTION, Action.STOP, details=where)
    cause = "" if outcome.explained else hit.says
    return _of_rank(of, outcome, hit.rule.kind, hit.rule.action, cause, details=where)


def _silent(of: Evidence, outcome: Outcome, first: re.Match[str] | None) -> Verdict:
    """What a rank that ended without a word is a case of: by the signal that ended it, or by its log."""
    code = int(first[1]) if first and int(first[2]) == outcome.local_rank else 0
    seen = (f"torchrun: {first[0].strip()}",) if first and code else ()
    where = _where(of, outcome)
    if code == -signal.SIGKILL:
        cause, kind = (_SHORT_OF_MEMORY, Kind.HOST_MEMORY) if of.memory_kills else (_KILLED, Kind.KILLED)
        return _of_rank(of, outcome, kind, Action.RESTART, cause, evidence=seen, details=where)
    said = _quiet(of.logs[outcome.local_rank].end) if outcome.local_rank in of.logs else ""
    shown = (*where, *_tail(said, output.label(of.node_rank, outcome.rank)))
    if hit := causes.found(causes.RANK, said):
        seen = (*seen, f"{_name(outcome)}'s log: {hit.line}")
        return _of_rank(of, outcome, hit.rule.kind, hit.rule.action, hit.says, evidence=seen, details=shown)
    if code < 0:
        cause = f"killed by {_signal_name(-code)}"
        return _of_rank(of, outcome, Kind.CRASH, Action.RESTART, cause, evidence=seen, details=shown)
    cause = f"ended with code {code} and no word" if code else "ended without a word"
    return _of_rank(of, outcome, Kind.EXCEPTION, Action.STOP, cause, evidence=seen, details=shown)


def _not_started(of: Evidence) -> Verdict:
    """What torchrun says where it started no rank."""
    shown = _tail(_quiet(of.agent), "[torchrun]")
    if hit := causes.found(causes.AGENT, of.agent):
        said, rule = (f"torchrun: {hit.line}",), hit.rule
        return _said(
            of, ExitCode.LAUNCH_UNAVAILABLE, rule.kind, hit.says, rule.action, evidence=said, details=shown
        )
    cause = "torchrun failed after its ranks" if of.outcomes else "torchrun could not start the ranks"
    return _said(of, ExitCode.LAUNCH_UNAVAILABLE, Kind.LAUNCH, cause, Action.STOP, details=shown)


def _folded(message: str) -> str:
    """A message as one line: what it says, and the first of the violations that it lists."""
    first, *rest = message.strip().splitlines() or [""]
    listed = [line.strip().removeprefix("- ") for line in rest if line.strip().startswith("- ")]
    more = f", and {len(listed) - 1} more" if len(listed) > 1 else ""
    return (f"{first}: {listed[0]}{more}" if listed else first)[:_LONGEST]


def _name(outcome: Outcome) -> str:
    return f"rank {outcome.rank}"


def _where(of: Evidence, outcome: Outcome) -> tuple[str, ...]:
    log = of.logs.get(outcome.local_rank)
    return (f"{_name(outcome)}'s log: {log.path}",) if log else ()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _quiet(text: str) -> str:
    return _WARNING.sub("", text)


def _tail(text: str, before: str) -> tuple[str, ...]:
    lines = text.rstrip().splitlines()[-_TAIL_LINES:]
    return tuple(f"{before} {line}" for line in lines)
