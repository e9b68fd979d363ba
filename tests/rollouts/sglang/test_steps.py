"""The order of all calls, and the traps of SGLang: each has a test that fails without its guard."""

import threading
from functools import partial

import pytest

from bundle.errors import JobFailed, UsageError
from bundle.rollouts import Request, Rollout, Sampling
from bundle.rollouts.sglang.checksums import FirstReplicaChecksums
from bundle.rollouts.sglang.client import Client, Keys, ServerCallFailed
from bundle.rollouts.sglang.server import ServerReplica
from bundle.weight_sync.manifest import ExpectedTensors
from bundle.weight_sync.states import FreeMemoryWait, Step, SyncedReplica
from bundle.weight_sync.transports.files import FilesTransport
from tests.rollouts.sglang.building import (
    REQUESTS,
    SAMPLING,
    Checksums,
    Cluster,
    build_tensors,
    run_cluster,
)
from tests.rollouts.sglang.contract_server import ContractServer, wait_until
from tests.rollouts.sglang.contract_weights import DRAFT, KINDS, Weights, name_version

TO_REST = ["/pause_generation", "/flush_cache", "/release_memory_occupation"]
UPDATE, CHECK = "/update_weights_from_disk", "/weights_checker"
TO_SERVE = ["/update_weight_version", "/model_info", "/resume_memory_occupation", "/continue_generation"]


@pytest.fixture(params=["old", "new"])
def cluster(request, tmp_path):
    with run_cluster(tmp_path, protocol=request.param) as cluster:
        yield cluster


def test_all_calls_come_in_their_order_with_their_fields(cluster: Cluster):
    engine: Rollout = cluster.rollout
    cluster.sync(1)
    first = cluster.calls[0][:]
    paths = [path for path, _ in first]
    assert paths == [
        "/health_generate",
        *TO_REST,
        UPDATE,
        "/begin_weight_update",
        CHECK,
        CHECK,
        UPDATE,
        CHECK,
        CHECK,
        *TO_SERVE,
    ]
    checks = [body for path, body in first if path == CHECK]
    selector = {"selector": "all"} if cluster.protocol == "new" else {}
    actions = ["checksum", "reset_tensors", "checksum", "checksum"]
    assert checks == [{"action": action, **selector} for action in actions]
    bodies = dict(first)
    assert bodies["/pause_generation"] == {"mode": "abort"}
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        assert bodies[path] == {"tags": ["kv_cache"]}
    assert bodies["/update_weight_version"] == {"new_version": "1", "abort_all_requests": False}
    update = bodies[UPDATE]
    assert update.pop("model_path").startswith(str(cluster.folder))
    assert update == {"load_format": "safetensors", "flush_cache": False, "abort_all_requests": False}
    assert cluster.ask() == [(1, 1, 1)] * len(REQUESTS)

    del cluster.calls[0][:]
    engine.release_cache_until_sync()
    assert cluster.paths() == TO_REST and cluster.server().offloaded == {"kv_cache"}
    assert engine.version is None
    cluster.sync(2)
    assert cluster.paths() == [*TO_REST, UPDATE, CHECK, *TO_SERVE] and engine.version == 2
    assert cluster.server().offloaded == set() and not cluster.server().is_paused
    del cluster.calls[0][:]
    cluster.sync(3)  # without a rest before
    assert cluster.paths() == [*TO_REST, UPDATE, CHECK, *TO_SERVE]
    assert cluster.ask() == [(3, 3, 3)] * len(REQUESTS)
    assert cluster.launchers[0].starts == 1


def test_a_request_has_ids_log_probs_and_the_stops_that_sglang_reads(cluster: Cluster):
    cluster.sync(1)
    sampling = Sampling(temperature=0.7, max_completion_length=3, stop=(1, 5), seed=9, step=4, greedy=True)
    answers = cluster.rollout.generate([Request((3, 4), 8, 2)], sampling)
    path, body = cluster.calls[0][-1]
    assert path == "/generate"
    assert body.pop("sampling_params") == {
        "temperature": 0.7,
        "max_new_tokens": 3,
        "top_p": 1.0,
        "top_k": 1,
        "ignore_eos": False,  # it would ignore stop_token_ids, too
        "stop_token_ids": [1, 5],
        "skip_special_tokens": False,
    }
    assert body == {"rid": "9/4/8/2/0", "input_ids": [3, 4], "return_logprob": True}
    assert (answers[0].ids, answers[0].finish_reason) == ((1,), "stop")
    assert answers[0].log_probs.tolist() == [-0.5] and answers[0].versions.tolist() == [1]
    assert (answers[0].question, answers[0].answer) == (8, 2)


def test_old_keys_and_values_answer_for_nothing(cluster: Cluster):
    cluster.sync(1)
    cluster.ask()
    assert cluster.server().cache
    cluster.sync(2)
    assert cluster.ask() == [(2, 2, 2)] * len(REQUESTS)


def hold(cluster: Cluster, number: int = 0) -> threading.Thread:
    """A request that is computed at this moment."""
    server = cluster.server(number)
    server.token_seconds = 5
    client = Client(server.url, server.keys, 20)

    def ask():
        from bundle.rollouts.sglang.protocol import build_generate

        client.request_blocking(build_generate(Request((9,), 0, 0), SAMPLING, None))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: bool(server.requests))
    return thread


def test_an_update_and_a_version_leave_requests_that_run_alone(cluster: Cluster):
    cluster.sync(1)
    thread = hold(cluster)
    directory = next(path for path in cluster.folder.glob("*/*") if path.is_dir())
    cluster.replicas[0].load(directory)
    cluster.replicas[0].set_version("5")
    assert cluster.server().requests and not cluster.server().is_dead.is_set()
    cluster.replicas[0].abort_and_pause()
    thread.join()
    cluster.replicas[0].unpause()


def test_memory_is_released_when_nothing_runs(cluster: Cluster):
    cluster.sync(1)
    thread = hold(cluster)
    cluster.rollout.release_cache_until_sync()
    thread.join()
    assert cluster.server().offloaded == {"kv_cache"} and not cluster.server().is_dead.is_set()


def test_a_tag_that_is_not_released_is_not_resumed(tmp_path):
    server = ContractServer(Weights(KINDS, DRAFT), name_version)
    replica = Client(server.url, Keys(), 30)
    sync = SyncedReplica(replica, tags=())
    written = FilesTransport(tmp_path, ExpectedTensors({}, DRAFT, {}), has_draft=True).write(
        1, build_tensors(1).items()
    )
    expect = partial(Checksums().compute_expected_checksums, written.directory)
    for _ in range(2):
        sync.sync(1, lambda replica: replica.load(written.directory), expect)
        sync.pause_and_release_memory()
    sync.sync(1, lambda replica: replica.load(written.directory), expect)
    assert not server.is_dead.is_set() and sync.version == 1
    assert set(sync.seconds) == set(Step) - {Step.START, Step.COVER} and min(sync.seconds.values()) >= 0
    assert not {"/resume_memory_occupation", "/release_memory_occupation"} & {
        path for path, _ in server.calls
    }
    server.die("end")


def test_a_tag_is_released_and_resumed_once(cluster: Cluster):
    cluster.sync(1)
    for _ in range(2):
        cluster.rollout.release_cache_until_sync()
    cluster.sync(2)
    cluster.sync(3)
    counts = [cluster.paths().count(f"/{verb}_memory_occupation") for verb in ("release", "resume")]
    assert counts == [3, 3] and not cluster.server().is_dead.is_set()


@pytest.mark.parametrize("changed", ["unknown", "missing", "draft", "dtype"])
def test_other_names_are_refused_before_anything_is_paused(cluster: Cluster, changed, messages):
    cluster.sync(1)
    del cluster.calls[0][:]
    tensors = build_tensors(2)
    if changed == "unknown":
        tensors["model.new"] = tensors["model.embed_tokens.weight"]
    elif changed == "dtype":
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].to(float_of_eight_bits())
    else:
        del tensors["model.mtp.0.weight" if changed == "draft" else "model.embed_tokens.weight"]
    with pytest.raises(JobFailed) as error:
        cluster.rollout.sync(2, tensors.items())
    messages(error.value)
    assert cluster.paths() == [] and cluster.rollout.version is None
    with pytest.raises(JobFailed):
        cluster.ask()
    cluster.sync(3)
    assert cluster.ask() == [(3, 3, 3)] * len(REQUESTS)


def float_of_eight_bits():
    import torch

    return torch.float8_e4m3fn


def test_tensors_of_the_server_that_no_sync_replaces_end_the_first_sync(tmp_path, messages):
    with run_cluster(tmp_path, derived=("model.layers.0.extra",)) as cluster:
        with pytest.raises(JobFailed) as error:
            cluster.sync(1)
        assert error.value.violations[-1] == "model.layers.0.extra"
        messages(error.value)
        with pytest.raises(JobFailed):
            cluster.ask()
        assert "/generate" not in cluster.paths()


def test_a_server_without_a_sync_answers_nothing(cluster: Cluster):
    with pytest.raises(JobFailed):
        cluster.ask()
    cluster.rollout.release_cache_until_sync()
    assert cluster.calls == [[]] and cluster.launchers[0].starts == 0


def test_another_admin_key_opens_no_weights(tmp_path):
    server = ContractServer(Weights(KINDS, DRAFT), name_version, keys=Keys("api", "admin"))
    for keys in (Keys("api", "api"), Keys("", "")):
        with pytest.raises(ServerCallFailed) as error:
            Client(server.url, keys, 30).abort_and_pause()
        assert "401" in str(error.value)
    assert Client(server.url, Keys("api", "admin"), 30).is_healthy(30)
    Client(server.url, Keys("api", "admin"), 30).abort_and_pause()
    assert server.is_paused
    server.die("end")


def test_free_memory_is_read_from_the_device(tmp_path, messages):
    free = tmp_path / "free"
    free.write_text("10")
    memory = FreeMemoryWait(lambda: int(free.read_text()), 20, seconds=0.05)
    with run_cluster(tmp_path / "weights", memory=memory) as cluster:
        with pytest.raises(JobFailed) as error:
            cluster.sync(1)
        messages(error.value)
        assert UPDATE not in cluster.paths()
        timer = threading.Timer(0.02, free.write_text, ["20"])
        timer.start()
        cluster.sync(2)
        timer.join()
        assert cluster.ask() == [(2, 2, 2)] * len(REQUESTS)


def test_an_interrupted_answer_goes_on_where_it_was(cluster: Cluster):
    sampling = Sampling(temperature=1.0, max_completion_length=20, stop=(), seed=1, step=1)
    cluster.sync(1)
    server = cluster.server()
    server.token_seconds = 0.02
    timer = threading.Timer(0.15, server.abort)
    timer.start()
    answers = cluster.rollout.generate(REQUESTS, sampling)
    timer.join()
    assert [answer.ids for answer in answers] == [(1,) * 20] * len(REQUESTS)
    assert {answer.finish_reason for answer in answers} == {"length"}
    assert (
        {len(answer.log_probs) for answer in answers} == {len(answer.versions) for answer in answers} == {20}
    )
    later = [body for path, body in server.calls if path == "/generate" and not body["rid"].endswith("/0")]
    assert later
    for body in later:
        done = int(body["rid"].rpartition("/")[2])
        assert body["input_ids"][3:] == [1] * done
        assert body["sampling_params"]["max_new_tokens"] == 20 - done


def test_checksums_come_from_the_first_replica_where_nothing_else_computes_them(tmp_path):
    with run_cluster(tmp_path, 2, checksums=FirstReplicaChecksums()) as cluster:
        cluster.sync(1)
        cluster.server(1).weights.values["model.embed_tokens.weight"] = b""
        cluster.sync(2)
        assert cluster.ask() == [(2, 2, 2)] * len(REQUESTS)


def test_a_checksum_that_takes_long_is_asked_for_once(tmp_path):
    import time

    class SlowChecksums(Checksums):
        def compute_expected_checksums(self, directory, checksums):
            time.sleep(0.6)
            return super().compute_expected_checksums(directory, checksums)

    with run_cluster(tmp_path, checksums=SlowChecksums()) as cluster:
        counts = []
        for version in (1, 2, 3, 4):
            cluster.sync(version)
            counts.append(cluster.paths().count(CHECK))
        assert counts == [4, 5, 5, 5]
        cluster.server().die("killed")
        cluster.sync(5)  # what was started anew is proven anew
        assert cluster.paths().count(CHECK) == 6
        assert cluster.ask() == [(5, 5, 5)] * len(REQUESTS)


@pytest.mark.parametrize("verify, count", [("always", 6), ("first", 4)])
def test_checksums_are_asked_for_as_the_recipe_says(tmp_path, verify, count):
    with run_cluster(tmp_path, verify=verify) as cluster:
        for version in (1, 2, 3):
            cluster.sync(version)
        assert cluster.paths().count(CHECK) == count


def test_attached_servers_are_synced_and_not_started(tmp_path):
    servers = [ContractServer(Weights(KINDS, DRAFT), name_version, keys=Keys("a", "b")) for _ in range(2)]
    replicas = [Client(server.url, Keys("a", "b"), 30) for server in servers]
    with run_cluster(tmp_path, replicas=replicas) as cluster:
        cluster.sync(1)
        assert cluster.ask() == [(1, 1, 1)] * len(REQUESTS)
        servers[0].die("killed")
        assert cluster.ask() == [(1, 1, 1)] * len(REQUESTS)
        cluster.sync(2)
        assert cluster.ask() == [(2, 2, 2)] * len(REQUESTS)
        servers[1].die("killed")
        with pytest.raises(JobFailed):
            cluster.sync(3)
        with pytest.raises(JobFailed):
            cluster.ask()
    assert {path for path, _ in servers[0].calls} & {"/generate"} and not servers[0].offloaded


def test_keys_are_in_no_text():
    keys = Keys("first", "second")
    assert "first" not in repr(keys) and "second" not in repr(keys)
    assert keys.hide("first, second, third") == "***, ***, third"


def test_requests_that_the_model_cannot_answer_are_refused(cluster: Cluster, messages):
    cluster.sync(1)
    requests = [Request((), 0, 0), Request((1, 100), 1, 0), Request((-1,), 2, 0), Request((1,) * 62, 3, 0)]
    with pytest.raises(UsageError) as error:
        cluster.rollout.generate([*requests, Request((1,) * 61, 4, 0)], SAMPLING)
    messages(error.value)
    assert len(error.value.violations) == 4
    assert "/generate" not in cluster.paths()


def test_a_server_that_dies_again_and_again_is_not_started_for_ever(tmp_path, messages):
    with run_cluster(tmp_path) as cluster:
        cluster.sync(1)
        for version in range(2, 8):
            cluster.server().die("killed")
            if version < 7:
                cluster.sync(version)
        with pytest.raises(JobFailed) as error:
            cluster.sync(9)
        messages(error.value)
        assert cluster.launchers[0].starts == 6
        assert isinstance(cluster.replicas[0], ServerReplica)
