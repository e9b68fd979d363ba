"""Causes of failures: the texts in which kernels, drivers and libraries report them, and the remedies.

The first matching rule counts. Xids and their remedies: docs.nvidia.com/deploy/xid-errors. Codes of HCCL: its
guide at hiascend.com, EI0002 and EI0006.
"""

import re
from enum import StrEnum
from typing import NamedTuple


class FailureKind(StrEnum):
    """The kind of a failure."""

    NOTHING = "nothing"
    PREEMPTED = "preempted"
    STOPPED = "stopped"
    REFUSED = "refused"  # the recipe, the environment or a patch
    LAUNCH = "launch"
    HANG = "hang"
    DEVICE = "device"
    DEVICE_MEMORY = "device memory"
    HOST_MEMORY = "host memory"
    SHARED_MEMORY = "shared memory"
    DISK = "disk"
    KILLED = "killed"
    CRASH = "crash"
    EXCEPTION = "exception"
    LOST_NODE = "lost node"
    NETWORK = "network"
    ECHO = "echo"  # a consequence of the end of another rank


# The kinds that a rank also reports when another rank is at fault; the later in the list, the likelier.
SECONDARY = (FailureKind.NETWORK, FailureKind.ECHO)


class RestartAction(StrEnum):
    """The remedy of a failure."""

    NONE = "none"
    RESTART = "restart"
    RESTART_WITHOUT = "restart without node"
    STOP = "stop"


class CauseRule(NamedTuple):
    """The meaning of a text: `cause` is our wording, with the named groups of `pattern` in braces."""

    kind: FailureKind
    pattern: re.Pattern[str]
    cause: str
    action: RestartAction


def _build_rule(kind: FailureKind, pattern: str, cause: str, action: RestartAction) -> CauseRule:
    return CauseRule(kind, re.compile(pattern, re.MULTILINE), cause, action)


# The Xids that are faults of the device. 13, 31 and 43 are faults of the program; 45 is a consequence.
_XIDS = {
    48: "an uncorrectable memory error",
    64: "a memory row that could not be remapped",
    74: "an NVLink error",
    79: "it has fallen off the bus",
    95: "an uncontained, uncorrectable memory error",
    119: "its system processor (GSP) does not answer",
    120: "an error of its system processor (GSP)",
    140: "an uncorrectable memory error",
    143: "it cannot be initialized",
}
_XID_PATTERN_TEMPLATE = r"NVRM: Xid \(PCI:(?P<device>[\w:.]+)\): {}\b(?:, pid='?(?P<pid>\d+))?"

# Lines of the kernel's log; a line with a process number is about that process.
KERNEL_RULES = (
    *(
        _build_rule(
            FailureKind.DEVICE,
            _XID_PATTERN_TEMPLATE.format(number),
            f"its GPU failed (Xid {number}): {meaning}",
            RestartAction.RESTART_WITHOUT,
        )
        for number, meaning in _XIDS.items()
    ),
    _build_rule(
        FailureKind.DEVICE,
        _XID_PATTERN_TEMPLATE.format(154) + r".*\((?P<action>[^()]*(?:Reset|Reboot|Drain)[^()]*)\)\s*$",
        "its GPU failed, and its driver asks for a recovery action (Xid 154): {action}",
        RestartAction.RESTART_WITHOUT,
    ),
    _build_rule(
        FailureKind.DEVICE,
        _XID_PATTERN_TEMPLATE.format(94),
        "its GPU had an uncorrectable memory error that affected only this process (Xid 94)",
        RestartAction.RESTART,
    ),
    _build_rule(
        FailureKind.DEVICE,
        r"Memory failure: .* (?:Killing|Sending SIGBUS to) .*?:(?P<pid>\d+) due to hardware memory"
        r" corruption",
        "the memory of its host is damaged",
        RestartAction.RESTART_WITHOUT,
    ),
    _build_rule(
        FailureKind.HOST_MEMORY,
        r"(?:Memory cgroup out|Out) of memory: Killed process (?P<pid>\d+)",
        "killed by the kernel because memory ran out: give the container more memory, or lower"
        " train.micro_batch_size or the number of ranks per node",
        RestartAction.RESTART,
    ),
)

PORT_IN_USE_ADVICE = (
    "the rendezvous port is in use on this node. End the process that listens on it, or name another port"
    " with --rendezvous"
)

# Messages of torchrun where it starts no rank.
AGENT_RULES = (
    _build_rule(
        FailureKind.LAUNCH,
        r"failed to listen on any local network address|EADDRINUSE|Address already in use",
        PORT_IN_USE_ADVICE,
        RestartAction.STOP,
    ),
)

# Messages in which a rank reports its end, or lines of its log before the end.
RANK_RULES = (
    _build_rule(
        FailureKind.DEVICE,
        r"uncorrectable ECC error encountered",
        "its device reports an uncorrectable memory error",
        RestartAction.RESTART_WITHOUT,
    ),
    _build_rule(
        FailureKind.DEVICE,
        r"CUDA error: (?P<what>no CUDA-capable device is detected|all CUDA-capable devices are busy or"
        r" unavailable|CUDA-capable device\(s\) is/are busy or unavailable|uncorrectable NVLink error"
        r" detected during the execution|Invalid access of peer GPU memory over nvlink or a hardware error"
        r"|system not yet initialized|unknown error)",
        "its device cannot be used: {what}",
        RestartAction.RESTART_WITHOUT,
    ),
    _build_rule(
        FailureKind.DEVICE_MEMORY,
        r"(?:CUDA|NPU) out of memory",
        "its device ran out of memory: lower train.micro_batch_size, recompute more, or split the model"
        " over more ranks; `mcore-bundle plan` shows what uses the memory",
        RestartAction.STOP,
    ),
    _build_rule(
        FailureKind.SHARED_MEMORY,
        r"out of shared memory|creating shared memory segment /dev/shm|/dev/shm.*No space left",
        "/dev/shm is full: give the container more shared memory",
        RestartAction.STOP,
    ),
    _build_rule(
        FailureKind.HOST_MEMORY,
        r"^MemoryError\b|Cannot allocate memory",
        "its host ran out of memory: raise the limit (`ulimit -v`, or the container's), or lower"
        " train.micro_batch_size or the number of ranks per node",
        RestartAction.STOP,
    ),
    _build_rule(
        FailureKind.DISK,
        r"No space left on device|Disk quota exceeded|no room left to write|no inodes left",
        "its disk is full: free space, or raise the quota",
        RestartAction.STOP,
    ),
    _build_rule(
        FailureKind.DISK,
        r"(?P<what>Read-only file system)",
        "its file system cannot be written: {what}. See `dmesg`, repair the file system, and mount it again",
        RestartAction.STOP,
    ),
    _build_rule(
        FailureKind.DISK,
        r"(?P<what>Stale file handle|Input/output error|Remote I/O error|Transport endpoint is not"
        r" connected)",
        "its file system failed: {what}",
        RestartAction.RESTART,
    ),
    _build_rule(
        FailureKind.CRASH,
        r"CUDA error: device-side assert triggered",
        "an assertion failed on its device, most often an index out of range; its log names the kernel",
        RestartAction.STOP,
    ),
    _build_rule(
        FailureKind.CRASH,
        r"CUDA error: (?P<what>an illegal memory access was encountered|misaligned address|an illegal"
        r" instruction was encountered|unspecified launch failure)",
        "a kernel failed on its device: {what}",
        RestartAction.RESTART,
    ),
    _build_rule(
        FailureKind.NETWORK,
        r"(?P<what>NET/\w+ ?:? .*(?:Got completion from peer|completed with error).*"
        r"|Call to ibv_modify_qp failed with .*"
        r"|\w*[sS]ocketPollConnect: .*exceeded error retry count.*|.*No route to host.*)",
        "the network between ranks failed: {what}",
        RestartAction.RESTART,
    ),
    _build_rule(
        FailureKind.NETWORK,
        r"(?P<what>EI0002|EI0006)\b",
        "the other ranks did not enter a collective of HCCL in time ({what})",
        RestartAction.RESTART,
    ),
    _build_rule(
        FailureKind.ECHO,
        r"Connection (?:closed|reset) by peer|Broken pipe|remote process exited|Connection was likely closed"
        r"|Connection closed by remote peer|Timed out waiting \d+ms for (?:recv|send) operation",
        "lost its connection to another rank",
        RestartAction.RESTART,
    ),
    _build_rule(
        FailureKind.ECHO,
        r"the checkpoint could not be written; rank 0 knows why \((?P<reason>.*)\)",
        "its checkpoint could not be written ({reason}); rank 0 may report another reason",
        RestartAction.RESTART,
    ),
)


class RuleMatch(NamedTuple):
    """A rule and its match in a text."""

    rule: CauseRule
    match: re.Match[str]

    @property
    def cause(self) -> str:
        """The cause, with the words of the text in place of the braces."""
        return self.rule.cause.format(**self.match.groupdict())

    @property
    def line(self) -> str:
        """The line of the text that contains the match."""
        text = self.match.string
        end = text.find("\n", self.match.end())
        return text[text.rfind("\n", 0, self.match.start()) + 1 : end if end >= 0 else None].strip()


def find_cause(rules: tuple[CauseRule, ...], text: str) -> RuleMatch | None:
    """Return the first rule that matches a text, with the match; None where no rule matches."""
    return next((RuleMatch(rule, match) for rule in rules if (match := rule.pattern.search(text))), None)
