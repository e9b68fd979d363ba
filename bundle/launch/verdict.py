"""The verdict of a launch: the failure, its rank and node, the evidence, and whether to start again.

Fixed rules decide; a verdict is a pure function of the evidence. It is written as one JSON and one sentence.
"""

import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from bundle import files
from bundle.errors import ExitCode
from bundle.launch import causes, hang, network, outcomes, output
from bundle.launch.causes import SECONDARY, FailureKind, RestartAction
from bundle.launch.evidence import LaunchEvidence
from bundle.launch.outcomes import RankState

FILE_NAME = "verdict.json"
FORMAT_NAME = "mcore-bundle verdict"
# The codes of a rank that knows the cause, which no restart mends; the most certain first.
_REFUSAL_CODES = (ExitCode.USAGE, ExitCode.ENVIRONMENT_UNFIT, ExitCode.PATCHES)
_NON_FAILURE_CODES = (None, ExitCode.OK, ExitCode.PREEMPTED)
_FIRST_DEATH_PATTERN = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+).*")
_TAIL_LINES = 15
_MAX_MESSAGE_CHARACTERS = 600
# A line of the warnings module, and the source line that it shows.
_WARNING_PATTERN = re.compile(r"^\S+:\d+: \w*Warning: .*\n(?:[ \t]+\S.*\n?)?", re.MULTILINE)
_AGENT_DEATH_CAUSE_TEMPLATE = "torchrun, which started the ranks (process {pid}): {cause}"
_SIGKILL_CAUSE_TEXT = "killed by SIGKILL, by a user or by the kernel because memory ran out (see `dmesg`)"
_OOM_KILL_CAUSE_TEXT = (
    "killed by SIGKILL while the kernel ended processes because memory ran out: give the container more"
    " memory, or lower train.micro_batch_size or the number of ranks per node"
)
_ADVICE_BY_RESTART_ACTION = {
    RestartAction.NONE: "",
    RestartAction.RESTART: "; the same command continues from the last checkpoint",
    RestartAction.RESTART_WITHOUT: "; restart without {node}",
    RestartAction.STOP: "; a restart does not mend this",
}


@dataclass(frozen=True)
class Verdict:
    """The end of a launch: exit code, failure, place, evidence and remedy.

    `cause` is one line; `details` are further lines for a person. `rank` is None where no rank is concerned.
    `silent`: nodes without a verdict when this one was made.
    """

    code: ExitCode
    kind: FailureKind = FailureKind.NOTHING
    cause: str = ""
    action: RestartAction = RestartAction.NONE
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
        """The failure, its rank and node, and whether to start again, in one sentence."""
        if self.kind in (FailureKind.NOTHING, FailureKind.PREEMPTED, FailureKind.STOPPED):
            return self.cause
        if self.code == ExitCode.HANG:  # the cause is about several ranks or nodes, and names them
            return f"{self.cause}{_ADVICE_BY_RESTART_ACTION[self.action]}"
        place_parts = [] if self.rank is None else [f"rank {self.rank}"]
        place_parts += [self.node] if self.nodes > 1 and self.node else []
        device = f", {self.device}" if self.device else ""
        subject = f"{' on '.join(place_parts)}{device}: " if place_parts else ""
        if (self.kind, self.action) == (FailureKind.LAUNCH, RestartAction.RESTART):
            advice = "; the same command tries again"
        else:
            advice = _ADVICE_BY_RESTART_ACTION[self.action].format(node=self.node)
        return f"{subject}{self.cause.removesuffix('.') if advice else self.cause}{advice}"

    def to_text(self) -> str:
        """Return the text for a person: the details, then the sentence."""
        return "\n".join([*self.details, self.sentence])

    def dump(self) -> dict[str, Any]:
        """Return the JSON values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"format": FORMAT_NAME, **values, "code": int(self.code), "sentence": self.sentence}


def write(folder: Path, verdict: Verdict) -> None:
    """Write a verdict into the log folder of its launch. Raise JobFailed where nothing can be written."""
    files.write_json(folder / FILE_NAME, verdict.dump())


def parse(values: Mapping[str, Any]) -> Verdict:
    """Return the verdict in the JSON values of `Verdict.dump`."""
    field_values = {field.name: values[field.name] for field in fields(Verdict)}
    field_values |= {
        "code": ExitCode(field_values["code"]),
        "kind": FailureKind(field_values["kind"]),
        "action": RestartAction(field_values["action"]),
    }
    return Verdict(
        **field_values | {name: tuple(field_values[name]) for name in ("evidence", "details", "silent")}
    )


def judge(launch: LaunchEvidence) -> Verdict:
    """Return the verdict of a launch on one node, first from ranks that know the cause, then from others."""
    verdict = _find_verdict(launch)
    return replace(verdict, evidence=(*verdict.evidence, *(f"before: {notice}" for notice in launch.notices)))


def _find_verdict(launch: LaunchEvidence) -> Verdict:
    ended = sorted(
        (outcome for outcome in launch.outcomes if outcome.code),
        key=lambda outcome: (not outcome.explained, outcome.time),
    )
    if launch.status == 0:  # ranks that have saved and stopped end with 0 too
        return _detect_preemption(launch, ended) or _build_verdict(launch, ExitCode.OK)
    if launch.wait_failure:
        return _build_verdict(
            launch,
            ExitCode.LAUNCH_UNAVAILABLE,
            FailureKind.LAUNCH,
            launch.wait_failure,
            RestartAction.RESTART,
        )
    for detect in (
        _detect_refusal,
        _detect_preemption,
        _detect_kernel_log_failure,
        _detect_hang,
        _detect_launch_unavailable_report,
        _detect_stop,
    ):
        if (verdict := detect(launch, ended)) is not None:
            return verdict
    broken = sorted(_judge_broken_ranks(launch, ended), key=lambda verdict: get_symptom_level(verdict.kind))
    if launch.storage_failure and not (broken and broken[0].kind is FailureKind.DISK):
        return _judge_storage_failure(launch, ended)
    return broken[0] if broken else _judge_unstarted_ranks(launch)


def has_seen_death(agent_log: str) -> bool:
    """Return whether torchrun's output says that a rank ended."""
    return _FIRST_DEATH_PATTERN.search(agent_log) is not None


def get_symptom_level(kind: FailureKind) -> int:
    """Return 0 for a kind that can only be a cause; more for one that may follow from another."""
    return SECONDARY.index(kind) + 1 if kind in SECONDARY else 0


def is_restartable_in_place(verdict: Verdict) -> bool:
    """Return whether the same ranks on the same nodes may succeed: not stopped by request, no bad node."""
    return verdict.action is RestartAction.RESTART and verdict.kind not in (
        FailureKind.PREEMPTED,
        FailureKind.STOPPED,
        FailureKind.LAUNCH,
    )


def _build_verdict(
    launch: LaunchEvidence,
    code: ExitCode,
    kind: FailureKind = FailureKind.NOTHING,
    cause: str = "",
    action: RestartAction = RestartAction.NONE,
    **verdict_fields: Any,
) -> Verdict:
    return Verdict(
        code,
        kind,
        cause,
        action,
        node=launch.node,
        node_rank=launch.node_rank,
        nodes=launch.nodes,
        **verdict_fields,
    )


def _build_rank_verdict(
    launch: LaunchEvidence,
    outcome: RankState,
    kind: FailureKind,
    action: RestartAction,
    cause: str = "",
    *,
    evidence: tuple[str, ...] = (),
    details: tuple[str, ...] = (),
) -> Verdict:
    """Return the verdict about one rank; the default of `cause` is the rank's message."""
    summary, message = _condense_message_to_line(outcome.message), outcome.message.rstrip().splitlines()
    quotes = (f"{_format_rank_number(outcome)}: {summary}",) if summary else ()
    # Messages of several lines are shown in full above the sentence.
    full_message = (f"{_format_rank_number(outcome)}: {message[0]}", *message[1:]) if len(message) > 1 else ()
    return _build_verdict(
        launch,
        ExitCode(outcome.code) if outcome.code not in _NON_FAILURE_CODES else ExitCode.JOB_FAILED,
        kind,
        cause or summary,
        action,
        rank=outcome.rank,
        evidence=(*evidence, *quotes),
        details=(*full_message, *details),
    )


def _detect_refusal(launch: LaunchEvidence, ended: list[RankState]) -> Verdict | None:
    refusals = [outcome for outcome in ended if outcome.code in _REFUSAL_CODES]
    return (
        _build_rank_verdict(launch, refusals[0], FailureKind.REFUSED, RestartAction.STOP)
        if refusals
        else None
    )


def _detect_preemption(launch: LaunchEvidence, ended: list[RankState]) -> Verdict | None:
    saved = [outcome for outcome in ended if outcome.code == ExitCode.PREEMPTED]
    if not saved or any(o.code not in (ExitCode.OK, ExitCode.PREEMPTED, None) for o in launch.outcomes):
        return None
    return _build_verdict(
        launch, ExitCode.PREEMPTED, FailureKind.PREEMPTED, saved[0].message, RestartAction.RESTART
    )


def _detect_kernel_log_failure(launch: LaunchEvidence, _: list[RankState]) -> Verdict | None:
    """Return a verdict from the kernel's log on a device or memory, if we were not stopped."""
    pids = {outcome.pid: outcome.rank for outcome in launch.outcomes}
    for line in launch.kernel_lines if launch.stop_signal is None else ():
        if (hit := causes.find_cause(causes.KERNEL_RULES, line)) is None:
            continue
        groups = hit.match.groupdict()
        pid = int(groups.get("pid") or 0)
        rank, is_agent = pids.get(pid), bool(pid) and pid == launch.agent_pid
        if rank is None and not is_agent and hit.rule.kind is FailureKind.HOST_MEMORY:
            continue  # a foreign process
        device = groups.get("device")
        return _build_verdict(
            launch,
            ExitCode.JOB_FAILED,
            hit.rule.kind,
            _AGENT_DEATH_CAUSE_TEMPLATE.format(pid=pid, cause=hit.cause) if is_agent else hit.cause,
            hit.rule.action,
            rank=rank,
            device=f"PCI {device}" if device else None,
            evidence=(f"kernel: {hit.line}",),
        )
    return None


def _detect_hang(launch: LaunchEvidence, ended: list[RankState]) -> Verdict | None:
    hang_reports = [outcome for outcome in ended if outcome.code == ExitCode.HANG]
    if not hang_reports:
        return None
    verdict = _judge_hang(launch, hang_reports[0])
    if not (pairs := network.find_cut_pairs(launch.connections)):
        return verdict
    return replace(
        verdict,
        kind=FailureKind.NETWORK,
        cause=f"no network between {network.describe_pairs(pairs)}: what one sends does not reach the other",
        rank=None,
        node=", ".join(dict.fromkeys(node for pair in pairs for node in pair)),
        evidence=(verdict.cause, *verdict.evidence),
    )


def _judge_hang(launch: LaunchEvidence, report: RankState) -> Verdict:
    """Return the verdict on a hang, from the snapshots of ranks or else from a rank's `report`."""
    if not launch.snapshots:
        silent = [outcome.rank for outcome in launch.outcomes if outcome.code is None]
        stuck = f"; no report from {outcomes.format_ranks(silent)}" if silent else ""
        return _build_rank_verdict(
            launch,
            report,
            FailureKind.HANG,
            RestartAction.RESTART,
            f"{_format_rank_number(report)}: {report.message}{stuck}",
        )
    text, rank = hang.summarize_hang(launch.snapshots)
    longest = max(launch.snapshots, key=lambda snapshot: snapshot.seconds)
    since = f" for {longest.seconds:.0f} s" if longest.seconds else ""  # only ranks know it
    cause = f"no progress{since}: {text}"
    verdict = _build_rank_verdict(launch, report, FailureKind.HANG, RestartAction.RESTART, cause)
    rank_snapshots = [snapshot for snapshot in launch.snapshots if snapshot.rank == rank]
    return replace(
        verdict,
        rank=rank,
        node=rank_snapshots[0].node if rank_snapshots else verdict.node,
        evidence=tuple(
            f"rank {snapshot.rank} on {snapshot.node}: {snapshot}" for snapshot in launch.snapshots
        ),
    )


def _detect_launch_unavailable_report(launch: LaunchEvidence, ended: list[RankState]) -> Verdict | None:
    reports = [outcome for outcome in ended if outcome.code == ExitCode.LAUNCH_UNAVAILABLE]
    return (
        _build_rank_verdict(launch, reports[0], FailureKind.LAUNCH, RestartAction.RESTART)
        if reports
        else None
    )


def _detect_stop(launch: LaunchEvidence, _: list[RankState]) -> Verdict | None:
    if launch.stop_signal is None:
        return None
    code = ExitCode.INTERRUPTED if launch.stop_signal == signal.SIGINT else ExitCode.TERMINATED
    cause = f"ended by {_get_signal_name(launch.stop_signal)} before a checkpoint was complete"
    return _build_verdict(launch, code, FailureKind.STOPPED, cause, RestartAction.RESTART)


def _judge_broken_ranks(launch: LaunchEvidence, ended: list[RankState]) -> Iterator[Verdict]:
    """Yield a verdict for each broken rank, the likeliest first cause first."""
    if launch.has_killed_ranks and launch.has_failed_elsewhere and not ended:
        cause = "its launcher ended its ranks because another node had ended before them"
        yield _build_verdict(launch, ExitCode.JOB_FAILED, FailureKind.ECHO, cause, RestartAction.RESTART)
        return
    ranks = {outcome.local_rank: outcome for outcome in launch.outcomes}
    order = [outcome.local_rank for outcome in ended if outcome.code != ExitCode.PREEMPTED]
    first, code = _FIRST_DEATH_PATTERN.search(launch.agent_log), 0
    has_agent_died = launch.status < 0 and not first and not launch.has_killed_ranks
    if first:
        code, first_local_rank = int(first[1]), int(first[2])
        # torchrun names the rank whose death it saw first, which is the cause when that death was a signal.
        is_own_kill = launch.has_killed_ranks and code == -signal.SIGKILL and order
        order = [first_local_rank, *order] if code < 0 and not is_own_kill else [*order, first_local_rank]
        ranks.setdefault(
            first_local_rank,
            RankState(launch.node_rank * launch.per_node + first_local_rank, first_local_rank, 0, 0.0),
        )
    elif not order and not has_agent_died:
        order = [outcome.local_rank for outcome in launch.outcomes if outcome.code is None][:1]
    for local_rank in dict.fromkeys(order):
        if ranks[local_rank].code:
            yield _judge_reported_failure(launch, ranks[local_rank])
        else:
            yield _judge_silent_failure(launch, ranks[local_rank], first)
    if has_agent_died:
        yield _judge_agent_death(launch)


def _judge_reported_failure(launch: LaunchEvidence, outcome: RankState) -> Verdict:
    """Return the verdict on a rank that wrote its outcome; an explained error keeps its message."""
    log_lines = _describe_log_path(launch, outcome)
    if (hit := causes.find_cause(causes.RANK_RULES, outcome.message)) is None:
        return _build_rank_verdict(
            launch, outcome, FailureKind.EXCEPTION, RestartAction.STOP, details=log_lines
        )
    cause = "" if outcome.explained else hit.cause
    return _build_rank_verdict(launch, outcome, hit.rule.kind, hit.rule.action, cause, details=log_lines)


def _judge_silent_failure(launch: LaunchEvidence, outcome: RankState, first: re.Match[str] | None) -> Verdict:
    """Return the verdict on a rank without an outcome, from its signal or its log."""
    code = int(first[1]) if first and int(first[2]) == outcome.local_rank else 0
    death_lines = (f"torchrun: {first[0].strip()}",) if first and code else ()
    log_lines = _describe_log_path(launch, outcome)
    kind, cause = _describe_signal(launch, -code)
    if code == -signal.SIGKILL:
        return _build_rank_verdict(
            launch, outcome, kind, RestartAction.RESTART, cause, evidence=death_lines, details=log_lines
        )
    log_tail = (
        _remove_warnings(launch.logs[outcome.local_rank].tail) if outcome.local_rank in launch.logs else ""
    )
    shown = (*log_lines, *_take_tail(log_tail, output.format_label(launch.node_rank, outcome.rank)))
    if hit := causes.find_cause(causes.RANK_RULES, log_tail):
        death_lines = (*death_lines, f"{_format_rank_number(outcome)}'s log: {hit.line}")
        return _build_rank_verdict(
            launch, outcome, hit.rule.kind, hit.rule.action, hit.cause, evidence=death_lines, details=shown
        )
    if code < 0:
        return _build_rank_verdict(
            launch, outcome, kind, RestartAction.RESTART, cause, evidence=death_lines, details=shown
        )
    cause = f"ended with exit code {code} and no message" if code else "ended without a message"
    return _build_rank_verdict(
        launch, outcome, FailureKind.EXCEPTION, RestartAction.STOP, cause, evidence=death_lines, details=shown
    )


def _judge_agent_death(launch: LaunchEvidence) -> Verdict:
    """Return the verdict on an agent that a signal ended; the kernel then kills its ranks."""
    kind, cause = _describe_signal(launch, -launch.status)
    return _build_verdict(
        launch,
        ExitCode.JOB_FAILED,
        kind,
        _AGENT_DEATH_CAUSE_TEMPLATE.format(pid=launch.agent_pid, cause=cause),
        RestartAction.RESTART,
        evidence=(f"torchrun: ended by {_get_signal_name(-launch.status)}",),
    )


def _describe_signal(launch: LaunchEvidence, number: int) -> tuple[FailureKind, str]:
    """Return the kind and the cause of an end by a signal that we did not send."""
    if number != signal.SIGKILL:
        return FailureKind.CRASH, f"killed by {_get_signal_name(number)}"
    if launch.has_memory_kills:
        return FailureKind.HOST_MEMORY, _OOM_KILL_CAUSE_TEXT
    return FailureKind.KILLED, _SIGKILL_CAUSE_TEXT


def _judge_storage_failure(launch: LaunchEvidence, ended: list[RankState]) -> Verdict:
    """Return the verdict on a log folder that cannot be written, with what the ranks could report."""
    return _build_verdict(
        launch,
        ExitCode.JOB_FAILED,
        FailureKind.DISK,
        launch.storage_failure,
        RestartAction.STOP,
        evidence=tuple(
            f"{_format_rank_number(outcome)}: {_condense_message_to_line(outcome.message)}"
            for outcome in ended
        ),
    )


def _judge_unstarted_ranks(launch: LaunchEvidence) -> Verdict:
    """Return the verdict from torchrun's output where it started no rank."""
    shown = _take_tail(_remove_warnings(launch.agent_log), "[torchrun]")
    if hit := causes.find_cause(causes.AGENT_RULES, launch.agent_log):
        quotes, rule = (f"torchrun: {hit.line}",), hit.rule
        return _build_verdict(
            launch,
            ExitCode.LAUNCH_UNAVAILABLE,
            rule.kind,
            hit.cause,
            rule.action,
            evidence=quotes,
            details=shown,
        )
    cause = "torchrun failed after its ranks" if launch.outcomes else "torchrun could not start the ranks"
    return _build_verdict(
        launch, ExitCode.LAUNCH_UNAVAILABLE, FailureKind.LAUNCH, cause, RestartAction.STOP, details=shown
    )


def _condense_message_to_line(message: str) -> str:
    """Return a message as one line: its first line and the first of the violations that it lists."""
    first, *rest = message.strip().splitlines() or [""]
    listed = [line.strip().removeprefix("- ") for line in rest if line.strip().startswith("- ")]
    more = f", and {len(listed) - 1} more" if len(listed) > 1 else ""
    return (f"{first}: {listed[0]}{more}" if listed else first)[:_MAX_MESSAGE_CHARACTERS]


def _format_rank_number(outcome: RankState) -> str:
    return f"rank {outcome.rank}"


def _describe_log_path(launch: LaunchEvidence, outcome: RankState) -> tuple[str, ...]:
    log = launch.logs.get(outcome.local_rank)
    return (f"{_format_rank_number(outcome)}'s log: {log.path}",) if log else ()


def _get_signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _remove_warnings(text: str) -> str:
    return _WARNING_PATTERN.sub("", text)


def _take_tail(text: str, prefix: str) -> tuple[str, ...]:
    lines = text.rstrip().splitlines()[-_TAIL_LINES:]
    return tuple(f"{prefix} {line}" for line in lines)
