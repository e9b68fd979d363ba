"""Weights in buckets: proven against files, sent once, and given up for files at the first fault."""

import pytest
import torch

from bundle.errors import JobFailed
from bundle.weight_sync.transports.ipc import Bucket, build_module_aligned_buckets, send_buckets_in_background
from tests.rollouts.sglang.building import REQUESTS, build_tensors, run_cluster
from tests.rollouts.sglang.contract_server import Fault
from tests.rollouts.sglang.contract_weights import KINDS, open_bucket, read_bucket
from tests.rollouts.sglang.test_faults import BUCKET
from tests.rollouts.sglang.test_steps import CHECK, TO_REST, TO_SERVE, UPDATE

pytestmark = pytest.mark.usefixtures("share_by_names")


@pytest.fixture
def run(tmp_path):
    def run(count=1, **changes):
        return run_cluster(tmp_path, count, bucket_device=torch.device("cpu"), **changes)

    return run


def answers(cluster) -> set[tuple[int, ...]]:
    found = cluster.ask()
    assert len(found) == len(REQUESTS)
    return {*found}


def test_the_first_version_comes_in_both_ways_and_the_next_ones_in_buckets(run):
    with run() as cluster:
        cluster.sync(1)
        by_files = ["/health_generate", *TO_REST, UPDATE, "/begin_weight_update", CHECK, CHECK, UPDATE]
        by_files += [CHECK, CHECK, *TO_SERVE]
        in_buckets = [*TO_REST, BUCKET, CHECK, CHECK, BUCKET, CHECK, CHECK, *TO_SERVE]
        assert cluster.paths() == [*by_files, *in_buckets]
        assert not [*cluster.folder.glob("*/*.safetensors")]
        assert not [path for path in cluster.folder.glob("*/*") if path.is_dir()]
        for version in (2, 3):
            assert answers(cluster) == {(version - 1,) * 3}
            del cluster.calls[0][:]
            cluster.sync(version)
            assert cluster.paths() == [*TO_REST, BUCKET, CHECK, *TO_SERVE]
        body = dict(cluster.calls[0])[BUCKET]
        assert len(body.pop("serialized_named_tensors")) == 1
        assert body == {"load_format": "flattened_bucket", "flush_cache": False, "abort_all_requests": False}
        assert answers(cluster) == {(3,) * 3}


@pytest.mark.parametrize(
    "kind, skip",
    [
        *((kind, skip) for kind in ("400", "500", "kill", "before") for skip in (0, 1)),
        ("lost", 1),
        ("swapped", 1),
    ],
)
def test_buckets_that_do_not_give_the_same_weights_are_given_up_at_the_start(run, kind, skip):
    with run() as cluster:
        cluster.faults[0].append(Fault(BUCKET, kind, skip))
        cluster.sync(1)
        assert cluster.faults == [[]] and answers(cluster) == {(1,) * 3}
        sent = cluster.paths().count(BUCKET)
        cluster.sync(2)
        assert cluster.paths().count(BUCKET) == sent and answers(cluster) == {(2,) * 3}


@pytest.mark.parametrize("kind", ["lost", "swapped", "400", "500", "kill", "before", "during", "after"])
def test_a_fault_in_a_bucket_takes_the_replica_out_and_files_come_after_it(run, kind):
    with run(2) as cluster:
        cluster.sync(1)
        cluster.faults[0].append(Fault(BUCKET, kind))
        cluster.sync(2)
        for calls in cluster.calls:
            del calls[:]
        assert answers(cluster) == {(2,) * 3}
        assert {*cluster.paths(1)} == {"/generate"} and cluster.paths(0) == []
        cluster.sync(3)
        assert answers(cluster) == {(3,) * 3}
        assert BUCKET not in cluster.paths(0) + cluster.paths(1)
        assert "/generate" in cluster.paths(0) and cluster.launchers[1].starts == 1


@pytest.mark.parametrize("path, kind", [(BUCKET, "lost"), (BUCKET, "500"), (CHECK, "digest")])
def test_the_only_replica_gets_the_weights_again_by_files(run, path, kind):
    with run() as cluster:
        cluster.sync(1)
        cluster.faults[0].append(Fault(path, kind))
        with pytest.raises(JobFailed):
            cluster.sync(2)
        assert cluster.rollout.can_recover_by_resync and cluster.rollout.version is None
        with pytest.raises(JobFailed):
            cluster.ask()
        cluster.sync(2)
        assert not cluster.rollout.can_recover_by_resync and answers(cluster) == {(2,) * 3}


def test_a_server_that_is_killed_while_it_answers_gets_the_weights_again_in_buckets(run):
    with run() as cluster:
        cluster.sync(1)
        cluster.faults[0].append(Fault("/generate", "kill", skip=2))
        with pytest.raises(JobFailed):
            cluster.ask()
        assert cluster.rollout.can_recover_by_resync and cluster.rollout.version is None
        del cluster.calls[0][:]
        cluster.sync(1)
        assert cluster.paths() == [
            "/health_generate",
            *TO_REST,
            BUCKET,
            "/begin_weight_update",
            CHECK,
            *TO_SERVE,
        ]
        assert answers(cluster) == {(1,) * 3}


@pytest.mark.parametrize("change", ["lost", "doubled", "shape", "unknown"])
def test_other_tensors_than_those_of_the_first_version_end_the_sync(run, change, messages):
    with run() as cluster:
        cluster.sync(1)
        entries = list(build_tensors(2).items())
        changed = {
            "lost": entries[:-1],
            "doubled": [*entries, entries[0]],
            "shape": [(entries[0][0], entries[0][1][:-1]), *entries[1:]],
            "unknown": [*entries, ("model.new", entries[0][1])],
        }[change]
        stream = iter(changed)
        with pytest.raises(JobFailed) as error:
            cluster.rollout.sync(2, stream)
        messages(error.value)
        assert [*stream] == [] and cluster.rollout.version is None
        with pytest.raises(JobFailed):
            cluster.ask()
        with pytest.raises(JobFailed):  # by files, which find it before anything is paused
            cluster.rollout.sync(2, iter(changed))
        assert not cluster.rollout.can_recover_by_resync
        cluster.sync(3)
        assert answers(cluster) == {(3,) * 3}


def test_a_draft_that_no_server_loads_is_left_out(run):
    with run(has_draft=False) as cluster:
        for version in (1, 2):
            cluster.sync(version)
            assert cluster.rollout.version == version and answers(cluster) == {(version,) * 3}
        assert not cluster.server().weights.warnings and BUCKET in cluster.paths()


def test_checksums_are_asked_for_as_the_recipe_says(run):
    with run(verify="first") as cluster:
        cluster.sync(1)
        for _ in range(2):
            del cluster.calls[0][:]
            cluster.sync(2)
            assert CHECK not in cluster.paths()
        cluster.server().die("killed")
        cluster.sync(3)  # what was started anew is proven anew
        assert CHECK in cluster.paths() and answers(cluster) == {(3,) * 3}


def test_a_bucket_holds_each_tensor_at_a_multiple_of_16_bytes():
    dtypes = {"a.b.weight": torch.bfloat16, "a.c.weight": torch.float32, "d": torch.bfloat16}
    tensors = [(name, torch.randn(5, 3)[:, ::2].to(dtype)) for name, dtype in dtypes.items()]
    payload = Bucket(tensors).share()
    _, places = open_bucket(payload)
    assert [place.start_idx % 16 for place in places] == [0, 0, 0]
    assert [place.start_idx for place in places] == sorted({place.start_idx for place in places})
    for (name, tensor), entry in zip(tensors, read_bucket(payload), strict=True):
        expected = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        assert (entry[0], entry[2], entry[3]) == (name, tuple(tensor.shape), expected)


def test_memory_that_cannot_be_shared_is_given_up_for_files(run, monkeypatch):
    def refuse(tensor):
        raise RuntimeError("expandable segments")

    with run() as cluster:
        monkeypatch.setattr(torch.UntypedStorage, "_share_filename_cpu_", refuse)
        for version in (1, 2):
            cluster.sync(version)
            assert BUCKET not in cluster.paths() and answers(cluster) == {(version,) * 3}


def test_buckets_end_between_modules_that_servers_do_not_join():
    sizes = {
        "m.0.attn.q_a.weight": 3,
        "m.0.attn.kv_a.weight": 3,
        "m.0.mlp.up.weight": 1,
        "m.0.mlp.down.weight": 9,
    }
    sizes |= {"m.1.attn.q_a.weight": 1, "embedding": 2}
    tensors = [(name, torch.ones(size, dtype=torch.uint8)) for name, size in sizes.items()]
    names = [
        [place.name for place in open_bucket(bucket.share())[1]]
        for bucket in build_module_aligned_buckets(tensors, 3)
    ]
    first, second, third = names
    assert first == ["m.0.attn.q_a.weight", "m.0.attn.kv_a.weight"]
    assert second == ["m.0.mlp.up.weight", "m.0.mlp.down.weight"]
    assert third == ["m.1.attn.q_a.weight", "embedding"]
    assert sum(map(len, names)) == len(sizes)


def test_a_bucket_is_filled_while_another_is_loaded_and_two_exist_at_most():
    import threading

    events: list[str] = []
    filled = threading.Event()

    def fill():
        for number in range(3):
            events.append(f"fill {number}")
            if number == 1:
                filled.set()
            yield number

    def load(number):
        if number == 0:
            assert filled.wait(10)
        events.append(f"loaded {number}")

    send_buckets_in_background(fill(), load)  # type: ignore[arg-type]
    assert events.index("fill 1") < events.index("loaded 0") < events.index("fill 2")
    assert events[-1] == "loaded 2"


def test_an_error_while_loading_is_raised():
    def load(bucket):
        raise JobFailed("no")

    with pytest.raises(JobFailed):
        send_buckets_in_background(build_module_aligned_buckets(build_tensors(1, KINDS).items()), load)
