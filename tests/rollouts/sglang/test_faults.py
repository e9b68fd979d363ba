"""No answer between a fault and the next whole sync, which heals; nothing hangs; 200 random sequences."""

import contextlib
import resource
import shutil
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bundle.errors import JobFailed
from bundle.rollouts.sglang import server as server_module
from tests.rollouts.sglang.building import (
    REQUESTS,
    SAMPLING,
    Cluster,
    build_tensors,
    run_cluster,
)
from tests.rollouts.sglang.contract_server import MANGLED, Fault

pytestmark = pytest.mark.processes  # servers that are killed and started again
STEPS = (
    "/pause_generation",
    "/flush_cache",
    "/release_memory_occupation",
    "/update_weights_from_disk",
    "/weights_checker",
    "/update_weight_version",
    "/model_info",
    "/resume_memory_occupation",
    "/continue_generation",
)
UPDATE, CHECK = "/update_weights_from_disk", "/weights_checker"
BUCKET = "/update_weights_from_tensor"
KINDS_OF_FAULTS = ("before", "during", "after", "400", "401", "500", "kill")
SPECIAL = [
    *((UPDATE, kind) for kind in ("nonsense", "lost", "swapped", "truncated")),
    *((CHECK, kind) for kind in ("nonsense", "digest")),
    *((path, "nonsense") for path in ("/pause_generation", "/model_info", "/continue_generation")),
]


def check_that_a_fault_costs_its_replica_alone(cluster: Cluster, path: str, kind: str) -> None:
    cluster.sync(1)
    cluster.faults[0].append(Fault(path, kind))
    for calls in cluster.calls:
        del calls[:]
    cluster.sync(2)
    assert cluster.faults == [[], []]
    assert cluster.ask() == [(2, 2, 2)] * len(REQUESTS)
    assert "/generate" not in cluster.paths(0) and "/generate" in cluster.paths(1)
    cluster.sync(3)
    assert cluster.ask() == [(3, 3, 3)] * len(REQUESTS)
    assert "/generate" in cluster.paths(0) and cluster.launchers[1].starts == 1


@pytest.mark.parametrize("kind", KINDS_OF_FAULTS)
def test_a_fault_in_any_step_takes_the_replica_out_until_the_next_sync(tmp_path, kind):
    for path in STEPS:
        with run_cluster(tmp_path / path[1:], 2, "new") as cluster:
            check_that_a_fault_costs_its_replica_alone(cluster, path, kind)


@pytest.mark.parametrize("path, kind", SPECIAL)
def test_weights_that_are_changed_on_their_way_take_the_replica_out(tmp_path, path, kind):
    # Each server loads its own copy, or a truncated file would break both.
    with run_cluster(tmp_path, 2, "new") as cluster:
        if kind == "truncated":
            give_copies(cluster)
        check_that_a_fault_costs_its_replica_alone(cluster, path, kind)


def give_copies(cluster: Cluster) -> None:
    replica = cluster.replicas[0]
    load = replica.load

    def load_copy(directory: Path) -> None:
        load(shutil.copytree(directory, Path(tempfile.mkdtemp(dir=cluster.folder)) / "copy"))

    replica.load = load_copy  # type: ignore[method-assign]


def test_a_tensor_that_comes_twice_at_the_server_changes_nothing(tmp_path):
    with run_cluster(tmp_path) as cluster:
        cluster.sync(1)
        cluster.faults[0].append(Fault(UPDATE, "doubled"))
        cluster.sync(2)
        assert cluster.ask() == [(2, 2, 2)] * len(REQUESTS) and cluster.launchers[0].starts == 1


@pytest.mark.parametrize("path", ["/pause_generation", UPDATE, "/resume_memory_occupation", "/generate"])
def test_a_server_that_says_nothing_costs_its_time_limit(tmp_path, path):
    with run_cluster(tmp_path, seconds=1.5) as cluster:
        cluster.sync(1)
        cluster.faults[0].append(Fault(path, "hang"))
        started = time.monotonic()
        if path != "/generate":
            cluster.sync(2)
        version = cluster.rollout.version
        assert cluster.ask() == [(version,) * 3] * len(REQUESTS)
        assert cluster.launchers[0].starts == 2
        assert 1.5 <= time.monotonic() - started < 15


@pytest.mark.parametrize("path, kind", [(UPDATE, "lost"), (UPDATE, "400"), ("/continue_generation", "kill")])
def test_the_only_replica_is_started_anew_in_the_same_sync(tmp_path, path, kind):
    with run_cluster(tmp_path) as cluster:
        cluster.sync(1)
        cluster.faults[0].append(Fault(path, kind))
        cluster.sync(2)
        assert cluster.launchers[0].starts == 2
        assert cluster.ask() == [(2, 2, 2)] * len(REQUESTS)


@pytest.mark.parametrize("kind", ["kill", "before", "during", "after", "500", "401", "nonsense", *MANGLED])
@pytest.mark.parametrize("count", [1, 2])
def test_a_fault_while_answering_costs_the_answers_of_that_replica(tmp_path, count, kind):
    with run_cluster(tmp_path, count, "new") as cluster:
        cluster.sync(1)
        cluster.server(0).token_seconds = 0.005
        cluster.faults[0].append(Fault("/generate", kind, skip=1))
        asked = cluster.calls[count - 1]
        answers = cluster.rollout.generate(REQUESTS, SAMPLING)
        assert [answer.ids for answer in answers] == [(1, 1, 1)] * len(REQUESTS)
        assert [(answer.question, answer.answer) for answer in answers] == [
            (request.question, request.answer) for request in REQUESTS
        ]
        # With another replica nothing is started; without one the same weights are sent again.
        assert cluster.launchers[0].starts == 3 - count
        if count == 2:
            assert cluster.paths(0).count("/generate") <= 4 < [path for path, _ in asked].count("/generate")


def test_what_a_replica_answers_after_its_fault_counts_for_nothing(tmp_path):
    with run_cluster(tmp_path) as cluster:
        cluster.sync(1)
        cluster.server().token_seconds = 0.2  # all others answer well behind the fault
        cluster.faults[0].append(Fault("/generate", "500"))
        assert cluster.ask() == [(1, 1, 1)] * len(REQUESTS)
        second_life = len(cluster.paths()) - cluster.paths()[::-1].index("/health_generate")
        later = [body["rid"] for path, body in cluster.calls[0][second_life:] if path == "/generate"]
        assert len({*later}) == len(REQUESTS)


def test_a_server_that_never_answers_well_ends_the_call(tmp_path, messages):
    with run_cluster(tmp_path) as cluster:
        cluster.sync(1)
        cluster.faults[0] += [Fault("/generate", "no log-probs") for _ in range(40)]
        with pytest.raises(JobFailed) as error:
            cluster.rollout.generate(REQUESTS[:1], SAMPLING)
        messages(error.value)


@pytest.mark.parametrize("change", ["lost", "doubled", "truncated", "disk full", "broken"])
def test_a_stream_that_is_not_whole_pauses_nothing_and_the_next_one_heals(tmp_path, change):
    with run_cluster(tmp_path) as cluster:
        cluster.sync(1)
        del cluster.calls[0][:]
        with pytest.raises(BrokenStream if change == "broken" else JobFailed):
            sync_badly(cluster, 2, change)
        assert cluster.paths() == []
        with pytest.raises(JobFailed):
            cluster.ask()
        cluster.sync(3)
        assert cluster.ask() == [(3, 3, 3)] * len(REQUESTS) and cluster.launchers[0].starts == 1


class BrokenStream(Exception):
    """What a rank may raise while it sends."""


def sync_badly(cluster: Cluster, version: int, change: str) -> None:
    entries = list(build_tensors(version).items())
    if change == "lost":
        del entries[3]
    if change == "doubled":
        entries.append(entries[3])
    if change == "truncated":
        entries[0] = (entries[0][0], entries[0][1][:-1])

    def stream():
        for number, entry in enumerate(entries):
            if change == "broken" and number == 3:
                raise BrokenStream
            yield entry

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if change == "disk full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        cluster.rollout.sync(version, stream())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


faults = st.builds(
    lambda replica, fault, skip: (replica, Fault(fault[0], fault[1], skip)),
    st.integers(0, 1),
    st.sampled_from(
        [(path, kind) for path in (*STEPS, BUCKET, "/generate") for kind in KINDS_OF_FAULTS]
        + SPECIAL
        + [(BUCKET, kind) for kind in ("nonsense", "lost", "swapped")]
        + [("/generate", kind) for kind in MANGLED]
        + [(UPDATE, "doubled")]
    ),
    st.integers(0, 2),
)
streams = st.sampled_from([None, None, None, "lost", "doubled", "truncated", "disk full"])
rounds = st.lists(st.tuples(st.lists(faults, max_size=2), streams, st.booleans()), min_size=1, max_size=2)


def check_random_faults(rounds, count: int, protocol: str, in_buckets: bool) -> None:
    folder = Path(tempfile.mkdtemp())
    limit, server_module._RESTARTS = server_module._RESTARTS, 100
    try:
        device = torch.device("cpu") if in_buckets else None
        with run_cluster(folder, count, protocol, bucket_device=device) as cluster:
            version = 1
            for ordered, change, rests in rounds:
                for replica, fault in ordered:
                    cluster.faults[replica % count].append(Fault(fault.path, fault.kind, fault.skip))
                synced = None
                with contextlib.suppress(JobFailed):
                    sync_badly(cluster, version, change or "")
                    synced = version
                assert cluster.rollout.version == synced
                answers = None
                with contextlib.suppress(JobFailed):
                    answers = cluster.ask()
                assert answers in (None, [(synced,) * 3] * len(REQUESTS))
                assert synced is not None or answers is None
                if rests:
                    cluster.rollout.release_cache_until_sync()
                version += 1
            for pending in cluster.faults:
                pending.clear()
            cluster.sync(version)
            assert cluster.ask() == [(version,) * 3] * len(REQUESTS)
    finally:
        server_module._RESTARTS = limit
        shutil.rmtree(folder)


sequences = given(
    rounds=rounds,
    count=st.integers(1, 2),
    protocol=st.sampled_from(["old", "new"]),
    in_buckets=st.booleans(),
)


@settings(max_examples=30)
@sequences
def test_random_faults_never_mix_versions_and_never_last(share_by_names, **case):
    check_random_faults(**case)


@pytest.mark.slow
@settings(max_examples=200)
@sequences
def test_two_hundred_sequences_of_random_faults(share_by_names, **case):
    check_random_faults(**case)
