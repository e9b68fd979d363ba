"""Where a rank stands, of the records that torch keeps of collectives."""

import os
import pickle

import pytest
import torch

from bundle.distributed import rank_snapshot, watchdog
from bundle.launch import hang


def record(name: str, *calls: tuple[str, int, str, int]) -> bytes:
    """A recorder's pickle: calls by what they are, number, state and time."""
    return pickle.dumps(
        {
            "entries": [
                {
                    "process_group": (name, "undefined"),
                    "profiling_name": f"x:{what}",
                    "collective_seq_id": number,
                    "p2p_seq_id": 0,
                    "is_p2p": False,
                    "input_sizes": [[2, 3]],
                    "state": state,
                    "retired": state == "completed",
                    "time_created_ns": at,
                }
                for what, number, state, at in calls
            ]
        }
    )


GLOO = record("1", ("barrier", 1, "completed", 10))
REDUCTION = "all_reduce of shape 2x3"
NCCL = record("7", ("all_reduce", 4, "completed", 20), ("all_reduce", 5, "started", 30))


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build with both recorders, as those for CUDA are."""
    there = torch._C._distributed_c10d
    monkeypatch.setattr(there, "_dump_nccl_trace", lambda **_: NCCL, raising=False)
    monkeypatch.setattr(there, "_dump_fr_trace", lambda **_: GLOO, raising=False)


def test_a_rank_stands_in_what_is_not_over_whichever_recorder_has_it(bindings):
    for records in (rank_snapshot.read_flight_records(), rank_snapshot.read_flight_records()[::-1]):
        stands = rank_snapshot.take_snapshot(3, "step 4", 30.0, records)
        assert stands.waits is not None
        waits = stands.waits
        assert (waits.description, waits.number, waits.group) == (REDUCTION, 5, "group 7")
        assert stands.entered == {"group 1": 1, "group 7": 5}


def test_of_two_that_are_not_over_the_first_holds_up_the_other():
    gloo = record("1", ("broadcast", 2, "started", 25))
    stands = rank_snapshot.take_snapshot(3, "step 4", 30.0, [NCCL, gloo])
    assert stands.waits is not None and stands.waits.description == "broadcast of shape 2x3"
    assert rank_snapshot.take_snapshot(3, "step 4", 30.0, [b"", GLOO]).waits is None


def test_both_records_are_left_for_torchs_own_analyzer(bindings, tmp_path):
    watchdog.dump_hang(tmp_path, 3, "step 4", 30.0)
    record = tmp_path / "hang-rank-3.flight"
    assert record.read_bytes() == NCCL
    assert record.with_suffix(".gloo.flight").read_bytes() == GLOO
    assert hang.read(tmp_path)[0].waits is not None


@pytest.mark.parametrize("newer", [True, False])
def test_collectives_are_recorded_unless_somebody_has_said_how_many(monkeypatch, newer):
    name = "TORCH_FR_BUFFER_SIZE" if newer else "TORCH_NCCL_TRACE_BUFFER_SIZE"
    if not newer:
        monkeypatch.delattr(torch._C._distributed_c10d, "_dump_fr_trace", raising=False)
    monkeypatch.setenv(name, "7")
    rank_snapshot.enable_flight_recorder()
    assert os.environ[name] == "7"
    monkeypatch.delenv(name)
    rank_snapshot.enable_flight_recorder()
    assert int(os.environ[name]) > 0
    monkeypatch.delenv(name)
