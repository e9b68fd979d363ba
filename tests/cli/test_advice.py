"""What `check` and `plan` say unasked: packs, what is held out, what `train` would refuse."""

import json
import re

import pytest

from bundle.checkpoints.directory import CheckpointDirectory
from bundle.checkpoints.state import FILE_NAME
from bundle.data import prepare
from bundle.data.cache import choose_cross_run_cache_directory
from bundle.recipe import load
from bundle.runs.directory import RunDirectory
from tests.command import capture_bundle
from tests.runs.test_origin import kept_by

ROWS = ["task=sft", "data.source=jsonl", "data.path=rows.jsonl", "data.template=plain", "data.validation=0.2"]
FLAGS = [f"--set={override}" for override in ROWS]


def write_rows(path, letters: int, count: int = 60) -> None:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * letters}]}
    path.write_text("\n".join(json.dumps(row) for _ in range(count)))


def begin_run(job) -> RunDirectory:
    """A run of three steps that was interrupted."""
    run = RunDirectory(job.default_run_directory)
    run.remove_results_and_write_start(job, {}, {})
    kept_by(run.root, job, 3)
    return run


def begin_run_with_data(job) -> None:
    """A run whose checkpoint says which data it was trained on."""
    run = begin_run(job)
    checkpoint = CheckpointDirectory(run.checkpoints).get_path(3)
    identity = dict(prepare(job, choose_cross_run_cache_directory(job, run.root)).identity)
    said = json.loads((checkpoint / FILE_NAME).read_text())
    said["state"]["metrics"]["data"] = identity
    (checkpoint / FILE_NAME).write_text(json.dumps(said))


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def advice(*flags) -> list[str]:
    code, text = capture_bundle("check", "demo", *FLAGS, "--json", *flags)
    assert code == 0, text
    found: list[str] = json.loads(text[text.index("{") :])["advice"]
    return found


def test_packs_are_advised_where_rows_are_mostly_padding(working_directory):
    """A row of n tokens of 128: its share, and how many rows take the room of one, by hand."""
    write_rows(working_directory / "rows.jsonl", 8)
    (said,) = advice()
    (tokens,) = re.findall(r"tokens +([\d,]+);", capture_bundle("check", "demo", *FLAGS)[1])
    share = int(tokens.replace(",", "")) / 60 / 128
    assert said.startswith("data.packed: ") and f"{100 * share:.0f} %" in said
    assert f"about {1 / share:.1f} times" in said
    assert advice("--set=data.packed=true", "--set=train.micro_batch_size=1", "--set=data.validation=0") == []
    write_rows(working_directory / "rows.jsonl", 90)
    assert advice() == []


def test_check_and_plan_say_what_is_held_out(working_directory):
    write_rows(working_directory / "rows.jsonl", 8)
    code, text = capture_bundle("check", "demo", *FLAGS)
    assert code == 0 and re.search(r"\b12 held .*data\.validation: 0\.2", text)
    assert re.search(r"^validation +20 % .*data\.validation", capture_bundle("plan", "demo", *FLAGS)[1], re.M)
    none = [*FLAGS, "--set=data.validation=0"]
    assert re.search(r"^validation +no data", capture_bundle("plan", "demo", *none)[1], re.M)


def test_another_lr_on_a_run_that_is_there_is_refused_by_plan_and_check(working_directory):
    (working_directory / "text.txt").write_text("some text\n" * 400)
    begin_run(load("demo", ["data.path=text.txt"]))
    words = ["demo", "--set=data.path=text.txt", "--set=optimizer.lr=0.5"]
    for verb in (["plan"], ["check"], ["train", "--dry-run"]):
        code, text = capture_bundle(verb[0], *words, *verb[1:])
        assert code == 2 and "optimizer.lr: 0.005 -> 0.5" in text, text


def test_check_takes_a_longer_run_with_resume_alone(working_directory):
    (working_directory / "text.txt").write_text("some text\n" * 400)
    begin_run_with_data(load("demo", ["data.path=text.txt"]))
    words = ["check", "demo", "--set=data.path=text.txt", "--set=train.steps=500"]
    code, text = capture_bundle(*words)
    assert code == 2 and "train.steps" in text
    assert capture_bundle(*words, "--resume")[0] == 0
    assert capture_bundle(*words, "--resume", "--run-directory=none")[0] == 2


def test_check_lists_what_is_against_a_job_on_another_machine_with_what_is_missing(working_directory):
    (working_directory / "text.txt").write_text("some text\n" * 400)
    words = ["check", "demo", "--hardware=h200"]
    code, text = capture_bundle(*words, "--set=data.path=gone.txt")
    batch = "train.global_batch_size"
    assert code == 2 and f"{batch}: 16" in text and "gone.txt" in text
    assert capture_bundle(*words, "--set=data.path=text.txt", f"--set={batch}=64")[0] == 0


def test_other_data_on_a_run_that_is_there_is_refused_by_check_after_its_counts(working_directory):
    (working_directory / "text.txt").write_text("some text\n" * 400)
    job = load("demo", ["data.path=text.txt"])
    begin_run_with_data(job)
    words = ["check", "demo", "--set=data.path=text.txt"]
    assert capture_bundle(*words)[0] == 0
    (working_directory / "text.txt").write_text("other text\n" * 400)
    code, text = capture_bundle(*words)
    assert code == 2 and "data tokens: was " in text and "tokens     " in text


def test_a_plan_for_another_machine_notes_files_that_are_not_here():
    flags = ["--set=data.path=gone.jsonl", "--set=data.source=jsonl", "--set=data.tokenizer=hf:nowhere"]
    code, text = capture_bundle("plan", "demo", *flags, "--hardware=cpu", "--json")
    notes = [note for note in json.loads(text)["notes"] if "checked on this machine" in note]
    assert code == 0 and [note.partition(" ")[0] for note in notes] == ["data.path", "data.tokenizer:"]
