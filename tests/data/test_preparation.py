"""The corpus of a run of several ranks: read by one of them, the same on all, or one clear error."""

import json
import shutil

import pytest

from tests.command import finish as ended
from tests.launch.launched import finish, start
from tests.training.test_interruption import train

pytestmark = pytest.mark.world
WORKER = "tests.data.readers"
FILE, OWN = "rows.jsonl", "own.jsonl"


@pytest.fixture
def rows(tmp_path):
    lines = [json.dumps({"text": f"row {number} of the data"}) for number in range(80)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return tmp_path


def list_places(lines):
    """Where the rows of each line of a list lie."""
    return [line.removeprefix("  - ").partition(": ")[0] for line in lines]


def said(folder):
    return [(folder / f"said-{rank}").read_text().split(", ") for rank in (0, 1)]


def test_one_rank_of_a_node_makes_tokens_all_have_them_and_skipped_rows_are_told(rows, messages):
    with (rows / "rows.jsonl").open("a") as file:
        file.write("\nx" * 1500)
    for writes in ("wrote 1", "wrote 0"):  # the second time from the store
        out, _ = finish(start(rows, WORKER, "same", "data.on_error=skip"), 0)
        (tokens, first), (others, second) = said(rows)
        assert tokens == others and (first, second) == (writes, "wrote 0")
        _, told, *reasons = out.splitlines()
        line = told.partition(" INFO ")[2]
        assert line.startswith("rank 0: ") and line.endswith("(1,500)")
        assert list_places(reasons) == [f"{FILE}:81, {FILE}:82, {FILE}:83 and 1,497 more"]
        messages(line)
        shutil.rmtree(rows / "logs")


def test_rows_that_are_too_long_are_told_when_training_starts(rows, messages):
    pairs = [{"prompt": "q" * (1 + number % 2 * 9), "response": "a" * number} for number in range(1, 9)]
    (rows / "rows.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    broken = ["x", "x", "[]", '{"prompt": "q"}', '{"prompt": "q", "response": 1}']
    (rows / "own.jsonl").write_text("\n".join([*map(json.dumps, pairs[1::2]), *broken]))
    keys = ("task=sft", "data.sequence_length=32", "data.validation=0", "data.truncation=right")
    own = ("data.validation_sets.own.path=own.jsonl", "data.on_error=skip")
    out, _ = finish(start(rows, WORKER, "same", *keys, *own), 0, 120)
    lines = [line.partition(" INFO ")[2] or line for line in out.splitlines()]
    _, told, deleted, cut, of_own, *corrupt, long, cut_of_own = lines
    assert told.endswith("(4 deleted, 2 cut)")
    (places,) = list_places([deleted])
    assert places.startswith(f"{FILE}:1 (37 tokens), {FILE}:3 (39 tokens), ")
    assert places.endswith(" and 1 more") and deleted.endswith(" deleted")
    assert list_places([cut]) == [f"{FILE}:6 (33 tokens), {FILE}:8 (35 tokens)"]
    assert "sets.own " in of_own and of_own.endswith("(5)")
    assert list_places(corrupt[:-1]) == [f"{OWN}:5, {OWN}:6", f"{OWN}:7", f"{OWN}:8"]
    assert "`check`" in corrupt[-1]
    assert "sets.own " in long and long.endswith("(0 deleted, 2 cut)")
    assert list_places([cut_of_own]) == [f"{OWN}:3 (33 tokens), {OWN}:4 (35 tokens)"]
    for line in (told, deleted, cut, of_own, corrupt[-1], long):
        messages(line)


def test_ranks_that_find_different_data_are_told_so_before_they_train(rows):
    (rows / "other").mkdir()
    (rows / "other" / "rows.jsonl").write_text((rows / "rows.jsonl").read_text().replace("row 7 ", "row 8 "))
    _, err = finish(start(rows, WORKER, "different"), 3)
    told = next(line for line in err.splitlines() if line.lstrip().startswith("- tokens (rank 0: "))
    assert "; rank 1: " in told and "files" not in told


@pytest.mark.slow
def test_reading_may_take_longer_than_any_patience_while_it_goes_on(rows):
    out, _ = finish(start(rows, WORKER, "slow"), 0, 120)
    assert any("reading the data: " in line and line.endswith(" tokens") for line in out.splitlines())
    assert said(rows)[0][1] == "wrote 1"


def test_a_reader_that_stands_still_is_a_hang_that_says_where(rows):
    _, err = finish(start(rows, WORKER, "stuck"), 6, 120)
    assert "no progress for " in err and "reading the data" in err


def test_corrupt_rows_end_the_job_on_all_ranks(rows):
    with (rows / "rows.jsonl").open("a") as file:
        file.write("\nx")
    _, err = finish(start(rows, WORKER, "same"), 2)
    assert f"{FILE}:81: " in err and not list(rows.glob("said-*"))


@pytest.mark.slow
def test_a_run_says_how_many_rows_it_skipped(rows):
    pytest.importorskip("megatron.core")
    with (rows / "rows.jsonl").open("a") as file:
        file.write("\nx" * 30)
    (rows / "own.jsonl").write_text((rows / "rows.jsonl").read_text() + "\nx" * 2)
    keys = ["train.steps=4", "data.source=jsonl", f"data.path={rows}/rows.jsonl", "data.separator=null"]
    keys += [f"data.validation_sets.own.path={rows}/own.jsonl"]
    flags = [word for key in [*keys, "data.on_error=skip"] for word in ("--set", key)]
    said = ended(train(rows / "run", *flags), 0)
    assert "(30)" in said and "(32)" in said
    result = json.loads((rows / "run" / "result.json").read_text())
    assert (result["skipped_rows"], result["skipped_validation_rows"]) == (30, {"own": 32})
    assert skipped(rows / "run") == [(0, 30)] and skipped(rows / "run", "data/skipped/own") == [(0, 32)]
    # A run that begins with a checkpoint tells its own; one that goes on without any does not tell it again.
    longer = [*flags, "--set", "train.steps=5", "--from", str(rows / "run")]
    ended(train(rows / "other", *longer), 0)
    assert skipped(rows / "other") == [(0, 30)]
    shutil.rmtree(rows / "other" / "checkpoints")
    (rows / "other" / "result.json").unlink()
    ended(train(rows / "other", *longer), 0)
    assert skipped(rows / "other") == [(0, 30)]


def skipped(run, name="data/skipped"):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line[name]) for line in lines if name in line]
