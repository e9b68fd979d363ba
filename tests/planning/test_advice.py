"""A plan names a larger micro-batch where it is faster and fits."""

import pytest

from bundle.environment.hardware import build_preset
from tests.planning.jobs import DEEPSEEK, QWEN3, job, plan

H200 = build_preset("h200")
ROWS = {"data": {"source": "text", "path": ["stdlib"], "sequence_length": 4096, "packed": False}}


def advised(config=DEEPSEEK, on=H200, per_node=1, **changes):
    """The micro-batch sizes that the notes of a plan name."""
    config = config | {"max_position_embeddings": 4096}
    train = {"steps": 10, "global_batch_size": 24, "micro_batch_size": 2} | changes.pop("train", {})
    made = plan(job(config, train=train, **{**ROWS, **changes}), on, per_node=per_node)
    notes = [note for note in made.notes if note.startswith("train.micro_batch_size: ")]
    return [int(note.split()[1]) for note in notes]


def test_the_largest_size_up_to_the_measured_tokens_is_advised():
    assert advised() == [8], "8 x 4,096 tokens"
    assert advised(train={"global_batch_size": 12}) == [4], "8 rows do not divide 12"


def test_every_data_parallel_rank_gets_whole_micro_batches():
    assert advised(per_node=4, parallel={"ep": 2}) == [], "each rank has 6 rows, no multiple of 4"
    assert advised(per_node=3) == [8], "each rank has 8 rows"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"config": QWEN3}, id="dense"),
        pytest.param({"train": {"micro_batch_size": 8}}, id="large already"),
        pytest.param({"per_node": 2, "parallel": {"pp": 2}}, id="pipeline"),
        pytest.param({"on": build_preset("cpu")}, id="no device"),
    ],
)
def test_nothing_is_advised_where_nothing_is_gained(changes):
    assert advised(**changes) == []


def test_advice_fits_the_memory():
    large = DEEPSEEK | {"hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 48}
    assert advised(large) == [4], "8 rows do not fit into nine tenths of the memory"
