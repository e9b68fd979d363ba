"""What is made of a launch that ended, from recorded texts."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle.errors import ExitCode
from bundle.launch import verdict as verdicts
from bundle.launch.causes import KERNEL_RULES, PORT_IN_USE_ADVICE, RANK_RULES, FailureKind, RestartAction
from bundle.launch.causes import find_cause as found_cause
from bundle.launch.evidence import LaunchEvidence, RankLog
from bundle.launch.hang import Collective, RankSnapshot
from bundle.launch.network import NodeConnections
from bundle.launch.outcomes import RankState
from bundle.launch.verdict import Verdict, judge

CODES = [None, *(int(code) for code in ExitCode)]
EVERYONE = "the group of all ranks"


def outcome(rank: int, code: int | None, message: str = "", **more: Any) -> RankState:
    return RankState(rank, rank, 1000 + rank, more.get("time", 0), code, message, more.get("explained", True))


def broke(rank: int, message: str, time: float = 1) -> RankState:
    return outcome(rank, 1, message, time=time, explained=False)


def judged(*outcomes: RankState, **more: Any) -> Verdict:
    return judge(LaunchEvidence(more.pop("status", 1), node="gpu07", per_node=4, outcomes=outcomes, **more))


def death(local_rank: int, code: int) -> str:
    """What torchrun writes of the first rank whose end it sees."""
    return (
        f"E1122 12:00:00.000000 7 torch/distributed/elastic/multiprocessing/api.py:882] failed"
        f" (exitcode: {code}) local_rank: {local_rank} (pid: {1000 + local_rank}) of binary: python\n"
    )


def recorded(name: str) -> list[tuple[str, str]]:
    """What was written down of ends, each with the sentence that it makes."""
    texts = (Path(__file__).parent / "recorded" / f"{name}.txt").read_text().strip().split("\n\n")
    return [(text, sentence) for text, _, sentence in (each.partition("\n=> ") for each in texts)]


def log(text: str) -> RankLog:
    return RankLog(Path("stderr.log"), text)


def test_the_rank_that_knows_what_is_wrong_speaks_before_the_one_that_only_broke(messages):
    found = judged(broke(0, "RuntimeError: boom"), outcome(1, 1, "shard 3 is corrupt", time=2))
    messages(found.sentence)
    assert (found.rank, found.kind, found.action) == (1, FailureKind.EXCEPTION, RestartAction.STOP)


def test_a_rank_that_broke_speaks_before_one_that_lost_its_connection_to_it(messages):
    gloo = "RuntimeError: [gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:34567"
    found = judged(broke(0, gloo, 1), broke(1, "KeyError: 'loss'", 2))
    messages(found.sentence)
    assert (found.rank, found.action) == (1, RestartAction.STOP)
    alone = judged(broke(0, gloo, 1), broke(2, gloo, 3))
    messages(alone.sentence)
    assert (alone.rank, alone.kind, alone.action) == (0, FailureKind.ECHO, RestartAction.RESTART)
    assert alone.evidence == (f"rank 0: {gloo}",)


def test_who_only_knows_that_a_checkpoint_failed_speaks_after_rank_0_and_leaves_a_restart_open():
    echo = outcome(
        3, 1, "RuntimeError: the checkpoint could not be written; rank 0 knows why (KeyError: 1)", time=1
    )
    full = outcome(0, 1, "run/checkpoints: OSError: No space left on device", time=2)
    assert judged(echo, full).kind is FailureKind.DISK and judged(echo, full).action is RestartAction.STOP
    assert ".;" not in judged(outcome(0, 1, "run/checkpoints: No space left on device. Free space.")).sentence
    alone = judged(echo)  # rank 0 was killed meanwhile, with its node
    assert alone.kind is FailureKind.ECHO and alone.action is RestartAction.RESTART


def test_what_no_restart_mends_is_stronger_than_what_broke_before(messages):
    found = judged(outcome(0, 1, "echo", time=1), outcome(1, 4, "patch x cannot be applied", time=2))
    messages(found.sentence)
    assert (found.code, found.rank, found.action) == (ExitCode.PATCHES, 1, RestartAction.STOP)


def test_several_violations_are_shown_whole_and_the_sentence_has_the_first(messages):
    found = judged(outcome(0, 3, "the ranks differ\n  - recipe (rank 0: a; rank 1: b)\n  - image (...)"))
    messages(found.to_text())
    assert len(found.to_text().splitlines()) == 4
    assert found.to_text().splitlines()[3:] == [found.sentence]


def test_a_hang_names_the_ranks_that_said_nothing(messages):
    found = judged(outcome(0, 6, "no progress"), outcome(1, None), outcome(2, None))
    messages(found.sentence)
    assert (found.code, found.kind, found.action) == (ExitCode.HANG, FailureKind.HANG, RestartAction.RESTART)


def test_a_hang_is_told_by_where_the_ranks_of_all_nodes_stand(messages):
    reduce = Collective(EVERYONE, (0, 1), 7, "all_reduce of shape 8")
    here = RankSnapshot(
        0, "gpu07", "step 4", 30.4, "`train` (loop.py:9)", reduce, {"the group of all ranks": 7}
    )
    there = RankSnapshot(1, "gpu08", silent="its process is stopped (SIGSTOP)")
    found = judged(outcome(0, 6, "no progress"), nodes=2, snapshots=(here, there))
    messages(found.sentence)
    messages(found.evidence[1])
    assert (found.rank, found.node, found.kind) == (1, "gpu08", FailureKind.HANG)


def test_a_hang_by_the_network_names_the_nodes_that_get_no_answer(messages):
    reduce = Collective(EVERYONE, (0, 1), 7, "all_reduce of shape 8")
    here = RankSnapshot(
        0, "gpu07", "step 4", 30.4, "`train` (loop.py:9)", reduce, {"the group of all ranks": 7}
    )
    nodes = (NodeConnections("gpu07", ("10.0.0.1",), ("10.0.0.2",)), NodeConnections("gpu08", ("10.0.0.2",)))
    for snapshots in ((here,), ()):
        hang = judged(outcome(0, 6, "no progress"), nodes=2, snapshots=snapshots)
        found = judged(outcome(0, 6, "no progress"), nodes=2, snapshots=snapshots, connections=nodes)
        assert (found.kind, found.code, found.action) == (FailureKind.NETWORK, 6, RestartAction.RESTART)
        assert (found.node, found.rank) == ("gpu07, gpu08", None)
        assert found.evidence == (hang.cause, *hang.evidence)
        alone = judged(outcome(0, 6, "no progress"), nodes=2, snapshots=snapshots, connections=nodes[:1])
        assert alone == hang
    messages(found.sentence)


def test_preempted_ranks_make_a_preempted_job_but_not_if_one_failed_to_save(messages):
    saved, stopped = outcome(0, 75, "saved step 7"), {"stop_signal": signal.SIGTERM}
    for number in (signal.SIGTERM, signal.SIGINT):
        found = judged(saved, outcome(1, None), stop_signal=number)
        assert (found.code, found.sentence) == (ExitCode.PREEMPTED, "saved step 7")
    # Ranks that have saved end well in the eyes of torchrun.
    assert judged(saved, outcome(1, 75), status=0, **stopped).kind is FailureKind.PREEMPTED
    assert judged(saved, outcome(1, 1, "disk full")).code == ExitCode.JOB_FAILED
    ended = judged(outcome(0, None), **stopped)
    messages(ended.sentence)
    assert ended.code == 143
    assert judged(outcome(0, None), stop_signal=signal.SIGINT).code == ExitCode.INTERRUPTED


def test_a_signal_is_read_from_what_torchrun_saw_first(messages):
    ranks = (broke(0, "RuntimeError: Connection closed by peer"), outcome(1, None))
    found = judged(*ranks, agent_log=death(1, -9))
    messages(found.sentence)
    messages(found.evidence[0])
    assert (found.rank, found.kind, found.action) == (1, FailureKind.KILLED, RestartAction.RESTART)
    found = judged(*ranks, agent_log=death(1, -9), has_memory_kills=True)
    messages(found.sentence)
    assert (found.kind, found.action) == (FailureKind.HOST_MEMORY, RestartAction.RESTART)
    found = judged(*ranks, agent_log=death(1, -11), has_memory_kills=True)
    messages(found.sentence)
    assert (found.rank, found.kind, found.action) == (1, FailureKind.CRASH, RestartAction.RESTART)


def test_a_rank_that_was_killed_first_comes_before_one_that_says_what_it_misses():
    found = judged(
        outcome(0, 1, "rank 1 sent no part of the weights"), outcome(1, None), agent_log=death(1, -9)
    )
    assert (found.kind, found.rank) == (FailureKind.KILLED, 1)
    # Unless it was we who killed it, since it outlived the other.
    found = judged(
        outcome(0, 1, "no room left to write"),
        outcome(1, None),
        agent_log=death(1, -9),
        has_killed_ranks=True,
    )
    assert (found.kind, found.rank) == (FailureKind.DISK, 0)
    found = judged(outcome(0, 1, "shard 3 is corrupt"), outcome(1, None), agent_log=death(1, 1))
    assert (found.kind, found.rank) == (FailureKind.EXCEPTION, 0)


def test_a_rank_that_was_killed_before_its_first_word_is_counted_over_all_nodes(messages):
    found = judged(agent_log=death(3, -11), node_rank=2, nodes=3)
    messages(found.sentence)
    assert (found.rank, found.node, found.kind) == (11, "gpu07", FailureKind.CRASH)


KERNEL_LINES, SPOKEN = recorded("kernel"), recorded("ranks")


@pytest.mark.parametrize(("line", "sentence"), KERNEL_LINES)
def test_the_kernel_knows_it_better_than_the_ranks(line, sentence):
    ranks = (*(broke(rank, "RuntimeError: CUDA error: unspecified launch failure") for rank in range(3)),)
    found = judged(*ranks, outcome(3, 6, "no progress"), nodes=2, kernel_lines=("usb 1-1: new device", line))
    assert found.sentence == sentence
    assert found.evidence == (f"kernel: {line}",)


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:0000:3b:00): 43, pid=1001, name=python, Ch 00000010",
        "NVRM: Xid (PCI:0000:3b:00): 794, pid=1001, name=python",
        "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0"
        " (None)",
        "Out of memory: Killed process 4711 (firefox) total-vm:9000kB",
    ],
)
def test_what_the_kernel_says_of_others_and_what_only_follows_is_no_cause(line):
    broken = broke(0, "KeyError: 'loss'")
    assert judged(broken, kernel_lines=(line,)) == judged(broken)


def test_who_was_told_to_stop_is_not_told_of_devices():
    assert (
        judged(outcome(0, None), kernel_lines=(KERNEL_LINES[0][0],), stop_signal=signal.SIGTERM).code == 143
    )


@pytest.mark.parametrize(("text", "says"), SPOKEN)
def test_what_libraries_say_is_known_in_the_word_of_a_rank_and_in_the_log_of_one_that_crashed(text, says):
    assert judged(broke(2, text), nodes=2).sentence == f"rank 2 on gpu07: {says}"
    crashed = judged(outcome(2, None), nodes=2, logs={2: log(text)}, agent_log=death(2, -6))
    assert crashed.sentence == f"rank 2 on gpu07: {says}"
    assert crashed.evidence[0].endswith(death(2, -6).strip().rpartition("] ")[2])
    assert crashed.evidence[1].startswith("rank 2's log: ")


def test_every_rule_about_a_rank_or_a_kernel_has_been_met():
    """No rule that an earlier one hides, or that none of the texts above is about."""
    texts = [line for line, _ in KERNEL_LINES] + [
        f"NVRM: Xid (PCI:0000:3b:00): {number}, pid=7, name=python"
        for number in (64, 74, 95, 119, 120, 140, 143)
    ]
    assert {found.rule for text in texts if (found := found_cause(KERNEL_RULES, text))} == set(KERNEL_RULES)
    assert {found.rule for text, _ in SPOKEN if (found := found_cause(RANK_RULES, text))} == set(RANK_RULES)


def test_an_error_that_we_explain_keeps_its_words_and_gets_what_to_do(messages):
    explained = "/runs/x: no room left to write (0 B free on its disk): free some"
    found = judged(outcome(1, 1, explained))
    messages(found.sentence)
    assert explained in found.sentence and (found.kind, found.action) == (
        FailureKind.DISK,
        RestartAction.STOP,
    )


LOG = """\
/x/torch/nn.py:12: UserWarning: old function
  warnings.warn(
/x/megatron/a.py:3: DeprecationWarning: old name
what the rank printed
Fatal Python error: Segmentation fault
"""


def test_the_log_of_a_rank_without_a_word_is_shown_without_warnings(messages):
    found = judged(outcome(1, None), logs={1: log(LOG)}, agent_log=death(1, -11))
    messages(found.to_text())
    assert len(found.to_text().splitlines()) == 4 and "Warning" not in found.to_text()


def test_what_a_rank_said_is_shown_once(messages):
    found = judged(outcome(1, 1, "shard 3"), logs={1: log(LOG + "rank 1: shard 3\n")})
    messages(found.to_text())
    assert found.to_text().count("shard 3") == 1


def test_without_any_rank_the_launch_itself_did_not_work(messages):
    found = judged(agent_log="No module named torch\n")
    assert found.code == ExitCode.LAUNCH_UNAVAILABLE
    messages(found.to_text())
    assert (found.kind, found.action) == (FailureKind.LAUNCH, RestartAction.STOP)


@pytest.mark.parametrize(
    "said",
    [
        "The server socket has failed to listen on any local network address. port: 29500, code: -98",
        "port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: in use",
        "OSError: [Errno 98] Address already in use",
    ],
)
def test_a_port_that_is_taken_is_no_ranks_fault(said):
    found = judged(agent_log=f"torch.distributed.DistNetworkError: {said}\n")
    assert found.sentence.startswith(PORT_IN_USE_ADVICE)
    assert (found.kind, found.action) == (FailureKind.LAUNCH, RestartAction.STOP)


def test_an_agent_that_a_signal_ended_is_named_and_its_ranks_are_not(messages):
    ranks = (outcome(0, None), outcome(1, None))
    for number, kind in ((-9, FailureKind.KILLED), (-11, FailureKind.CRASH)):
        for known in (ranks, ()):
            found = judged(*known, status=number, agent_pid=4711)
            assert (found.kind, found.rank, found.code) == (kind, None, ExitCode.JOB_FAILED)
            assert "4711" in found.sentence and found.action is RestartAction.RESTART
        messages(found.sentence)
    found = judged(*ranks, status=-9, agent_pid=4711, has_memory_kills=True)
    assert found.kind is FailureKind.HOST_MEMORY
    line = "Memory cgroup out of memory: Killed process 4711 (pt_elastic) total-vm:9kB"
    found = judged(*ranks, status=-9, agent_pid=4711, kernel_lines=(line,))
    messages(found.sentence)
    assert (found.kind, found.evidence) == (FailureKind.HOST_MEMORY, (f"kernel: {line}",))
    echo = "RuntimeError: [gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:34567"
    assert judged(broke(0, echo), ranks[1], status=-9, agent_pid=4711).kind is FailureKind.KILLED
    # What a rank reported before, and an agent that its launcher abandoned, are another matter.
    assert judged(broke(0, "KeyError: 1"), ranks[1], status=-9, agent_pid=4711).rank == 0
    assert judged(*ranks, status=-9, agent_pid=4711, has_killed_ranks=True).rank == 0


def test_a_log_folder_that_cannot_be_written_is_the_cause_unless_a_rank_knows_it_better(messages):
    failure = "/runs/x: the file system is not mounted"
    missing = outcome(1, 1, "/runs/x/state: No such file or directory")
    full = outcome(2, 1, "/runs/x/state: no room left to write")
    for ranks in ((outcome(0, None), missing), (outcome(0, None),), ()):
        found = judged(*ranks, storage_failure=failure)
        assert (found.kind, found.action, found.cause) == (FailureKind.DISK, RestartAction.STOP, failure)
        assert found.code == ExitCode.JOB_FAILED and found.rank is None
    assert judged(missing, storage_failure=failure).evidence == (f"rank 1: {missing.message}",)
    messages(found.sentence)
    assert judged(full, storage_failure=failure).rank == 2
    refused = judged(outcome(0, 3, "no such device"), storage_failure=failure)
    assert refused.kind is FailureKind.REFUSED


def test_ranks_that_their_launcher_ended_for_those_of_another_node_are_an_echo_and_who_broke_is_not(messages):
    agent = death(1, -9)
    ended = judged(
        outcome(0, None),
        outcome(1, None),
        agent_log=agent,
        has_killed_ranks=True,
        has_failed_elsewhere=True,
        nodes=2,
    )
    assert (ended.kind, ended.action, ended.rank) == (FailureKind.ECHO, RestartAction.RESTART, None)
    messages(ended.sentence)
    for more in ({"has_killed_ranks": True}, {"has_failed_elsewhere": True}):  # it has died before that
        assert (
            judged(outcome(0, None), outcome(1, None), agent_log=agent, nodes=2, **more).kind
            is FailureKind.KILLED
        )
    broken = judged(
        broke(0, "ValueError: a"), agent_log=agent, has_killed_ranks=True, has_failed_elsewhere=True, nodes=2
    )
    assert broken.kind is FailureKind.EXCEPTION


def test_the_json_has_all_of_it(tmp_path, messages):
    found = judged(agent_log=death(1, -11), nodes=2)
    verdicts.write(tmp_path, found)
    read = json.loads((tmp_path / "verdict.json").read_text())
    assert read.pop("details") == read.pop("silent") == []
    assert read.pop("evidence")[0].startswith("torchrun: failed")
    messages(read.pop("sentence"))
    assert read == {
        "format": "mcore-bundle verdict",
        "code": 1,
        "kind": "crash",
        "cause": "killed by SIGSEGV",
        "action": "restart",
        "rank": 1,
        "node": "gpu07",
        "node_rank": 0,
        "nodes": 2,
        "device": None,
    }


ENDS = st.lists(st.tuples(st.sampled_from(CODES), st.booleans()), max_size=4)


@given(ENDS, st.sampled_from([0, 1, -9]), st.sampled_from([None, signal.SIGTERM, signal.SIGINT]))
def test_every_end_has_one_of_our_codes_and_only_success_is_0(ends, agent, stopped_by):
    ranks = [outcome(rank, code, "why", explained=known) for rank, (code, known) in enumerate(ends)]
    found = judged(*ranks, status=agent, stop_signal=stopped_by)
    codes = {code for code, _ in ends}
    has_saved = 75 in codes and codes <= {None, 0, 75}
    succeeds = agent == 0 and not has_saved
    assert isinstance(found.code, ExitCode)
    assert (found.code == ExitCode.OK) == succeeds
    assert (found.kind is FailureKind.NOTHING) == (found.action is RestartAction.NONE) == succeeds
    assert found.sentence or succeeds


@given(st.text(), st.text(), st.text())
def test_any_text_makes_a_verdict_of_one_line(message, agent, kernel):
    found = judge(
        replace(
            LaunchEvidence(1),
            outcomes=(broke(0, message),),
            agent_log=agent,
            kernel_lines=(kernel,),
            logs={0: log(agent)},
        )
    )
    assert len(found.sentence.splitlines()) == 1


def test_the_page_lists_every_kind_and_every_action():
    page = (Path(__file__).parents[2] / "docs" / "launch.md").read_text()
    assert {each.value for each in (*FailureKind, *RestartAction) if f"`{each}`" not in page} == set()


def test_what_was_unusual_before_is_among_the_evidence_and_changes_nothing_else():
    noticed = ("step 4: rank 1 on gpu07 straggles", "step 9: the loss is 9")
    plain, told = (judged(broke(1, "ValueError: corrupt"), notices=each) for each in ((), noticed))
    assert told == replace(plain, evidence=(*plain.evidence, *(f"before: {each}" for each in noticed)))
