"""`train.micro_batch_size: auto` and the note about a larger size, by the plan of a job."""

import json

import pytest

from bundle.environment.hardware import build_preset
from bundle.launch import job as job_file
from bundle.planning import Plan, to_json
from bundle.recipe import from_mapping, list_differences, load
from bundle.runs.directory import RunDirectory
from tests.command import call_bundle
from tests.planning.jobs import DEEPSEEK, QWEN3, job, plan, with_memory

H200 = build_preset("h200")
ROWS = {"data": {"source": "text", "path": ["stdlib"], "sequence_length": 4096, "packed": False}}
LARGE = DEEPSEEK | {"hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 48}


def planned(size: int | str, config=DEEPSEEK, on=H200, per_node=1, **changes) -> Plan:
    config = config | {"max_position_embeddings": 4096}
    train = {"steps": 10, "global_batch_size": 24, "micro_batch_size": size} | changes.pop("train", {})
    return plan(job(config, train=train, **{**ROWS, **changes}), on, per_node=per_node)


def chosen(**changes) -> int:
    size = planned("auto", **changes).recipe.train.micro_batch_size
    assert size != "auto"
    return size


def notes(of: Plan) -> list[str]:
    return [note for note in of.notes if note.startswith("train.micro_batch_size: ")]


def advised(size: int = 2, **changes) -> list[int]:
    """The sizes that the notes of a plan name."""
    return [int(note.split()[1]) for note in notes(planned(size, **changes))]


def test_auto_is_the_largest_size_up_to_the_measured_tokens(messages):
    assert chosen() == 8, "8 x 4,096 tokens"
    assert chosen(train={"global_batch_size": 12}) == 6
    assert chosen(train={"global_batch_size": 7}) == 7
    (note,) = notes(planned("auto"))
    messages(note)


def test_every_data_parallel_rank_gets_whole_micro_batches_of_the_automatic_size():
    assert chosen(per_node=4, parallel={"ep": 2}) == 6
    assert chosen(per_node=8) == 3
    interleaved = {"pp": 2, "vpp": 2}
    layout = planned("auto", per_node=2, parallel=interleaved, config=QWEN3).layout
    assert layout is not None and layout.microbatches % 2 == 0


def test_an_automatic_size_fits_into_nine_tenths_of_the_memory(messages):
    assert chosen(config=LARGE) == 6, "8 rows do not fit"
    (note,) = notes(planned("auto", config=LARGE))
    assert "8 is predicted to be faster" in note
    messages(note)
    assert chosen(on=with_memory(H200, 0.1)) == 1
    tight = planned("auto", on=with_memory(H200, 0.05))
    assert tight.recipe.train.micro_batch_size == 1 and int(tight.exit_code) == 3


def test_a_pack_is_a_micro_batch(messages):
    of = planned("auto", data=ROWS["data"] | {"packed": True})
    assert of.recipe.train.micro_batch_size == 1 and not of.problems
    messages(*notes(of))


def test_a_pipeline_gets_more_and_smaller_micro_batches():
    config = QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288}
    assert chosen(config=config, per_node=4, parallel={"pp": 4}) < chosen(config=config)


def test_a_batch_that_no_size_divides_is_a_problem_of_the_plan():
    of = planned("auto", per_node=5)
    assert of.recipe.train.micro_batch_size == "auto"
    assert [int(problem.code) for problem in of.problems] == [2]
    assert "train.global_batch_size" in of.problems[0].text


def test_the_job_file_has_the_number(tmp_path):
    file = tmp_path / "job.json"
    sets = ["--set", "train.micro_batch_size=auto", "--set", "train.global_batch_size=64"]
    assert call_bundle("plan", "demo", "--hardware", "h200", *sets, f"--job={file}") == 0
    written = json.loads(file.read_text())
    assert written["recipe"]["train"]["micro_batch_size"] == 8
    assert job_file.load(file).recipe.train.micro_batch_size == 8
    of = planned("auto")
    assert to_json(of)["recipe"]["train"]["micro_batch_size"] == 8


def test_a_resumed_run_may_ask_for_auto_again(tmp_path):
    numbered, automatic = (load("demo", [f"train.micro_batch_size={size}"]) for size in (4, "auto"))
    assert from_mapping(automatic.dump()) == automatic
    (again,), (other,) = list_differences(numbered, automatic), list_differences(automatic, numbered)
    assert again.is_free_on_resume and not other.is_free_on_resume
    run = RunDirectory(tmp_path)
    run._write_recipe(numbered)
    run._refuse_other_recipe(automatic, longer=False)


def test_the_largest_size_is_advised(messages):
    assert advised() == [8]
    messages(*notes(planned(2)))
    assert advised(train={"global_batch_size": 12}) == [6]
    assert advised(per_node=3) == [8], "each rank has 8 rows"
    assert advised(config=QWEN3) == [8]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"size": 8}, id="large already"),
        pytest.param({"on": build_preset("cpu")}, id="no device"),
        pytest.param({"on": build_preset("a3")}, id="no known peak"),
        pytest.param({"config": LARGE, "size": 6}, id="no memory"),
        pytest.param({"size": 1, "data": ROWS["data"] | {"packed": True}}, id="packs"),
    ],
)
def test_nothing_is_advised_where_nothing_is_gained(changes):
    assert advised(**changes) == []
