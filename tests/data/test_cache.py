"""Tokens are made once, for every run that asks: by many processes, and after a kill from where it was."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from bundle.data import cache, prepare, store, tokenization
from bundle.data.cache import choose_cross_run_cache_directory
from bundle.data.sources import MAX_REASONS, DataErrors
from bundle.data.tokenizers import ByteTokenizer
from bundle.errors import JobFailed, UsageError
from bundle.recipe import load
from tests.launch.launched import ROOT, gone

LINES = 700


def write_rows(path: Path) -> Path:
    """Rows of which some are corrupt: for who reads them, and for who makes tokens of them."""
    random = np.random.default_rng(3)
    lines = []
    for number in range(LINES):
        text = "x" * int(random.integers(1, 90))
        row = {"prompt": f"{number}?", "response": text, "text": f"{number} {text}"}
        lines.append("broken" if number % 37 == 5 else json.dumps(row if number % 41 else {"other": 1}))
    path.write_text("\n".join(lines))
    return path


def recipe(path: Path, *overrides: str):
    keys = ["data.source=jsonl", f"data.path={path}", "data.separator=null", "data.on_error=skip"]
    return load("demo", [*keys, "data.sequence_length=128", *overrides])


def content(directory: Path) -> dict[str, bytes]:
    """What the only store under `directory` holds."""
    (folder,) = directory.glob("tokens-*")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(tokenization, "CHUNK_ROWS", 16)


@pytest.fixture
def encoded(monkeypatch):
    """How many texts were made tokens of in this process."""
    counted, original = [], ByteTokenizer.encode

    def encode(self, texts):
        counted.extend(texts)
        return original(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    return counted


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("task", ["pretrain", "sft"])
@pytest.mark.slow
def test_many_processes_make_what_one_makes(tmp_path, monkeypatch, encoded, task):
    made = recipe(write_rows(tmp_path / "rows.jsonl"), f"task={task}")
    before = prepare(made, tmp_path / "one")
    assert before.left_out.skipped > MAX_REASONS and encoded
    monkeypatch.setattr(tokenization, "MIN_PARALLEL_BYTES", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    encoded.clear()
    after = prepare(made, tmp_path / "three")
    assert not encoded, "tokens were made here"
    assert content(tmp_path / "one") == content(tmp_path / "three")
    assert before.identity == after.identity and before.left_out == after.left_out


MAKING = """
import sys, time
from pathlib import Path
from bundle.data import prepare, store, tokenization
from bundle.data.tokenizers import ByteTokenizer
from tests.data.test_cache import recipe
def slowly(self, texts, original=ByteTokenizer.encode):
    time.sleep(0.05)
    return original(self, texts)
def main():
    tokenization.CHUNK_ROWS, store.COMMIT_SECONDS, ByteTokenizer.encode = 16, 0.0, slowly
    if "workers" in sys.argv:
        tokenization.MIN_PARALLEL_BYTES = 0
    prepare(recipe(Path("rows.jsonl").absolute(), sys.argv[1]), Path("killed").absolute())
if __name__ == "__main__":
    main()
"""


def killed(folder: Path, *words: str) -> list[int]:
    """Kills a process that makes tokens, once its journal names some chunks; the pids of its children."""
    (folder / "making.py").write_text(MAKING)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen([sys.executable, "making.py", *words], cwd=folder, env=environment)
    deadline = time.monotonic() + 120
    while not any(
        json.loads(path.read_text())["chunks"] > 5 for path in folder.glob("killed/.tok*/journal.json")
    ):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    children = [int(pid) for pid in listed.read_text().split()] if listed.exists() else []
    process.send_signal(signal.SIGKILL)
    process.wait()
    return children


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("task", ["task=pretrain", "task=sft"])
def test_what_a_kill_has_left_is_gone_on_with(tmp_path, encoded, task):
    made = recipe(write_rows(tmp_path / "rows.jsonl"), task)
    before = prepare(made, tmp_path / "straight")
    whole = len(encoded)
    killed(tmp_path, task)
    assert not list((tmp_path / "killed").glob("tokens-*"))
    (begun,) = (tmp_path / "killed").glob(".tokens-*.building")
    for path in begun.glob("*.bin"):  # what was written after the journal's last entry
        path.write_bytes(path.read_bytes() + b"more")
    (begun / ".journal.json.0123456789abcdef").write_text("{")
    encoded.clear()
    after = prepare(made, tmp_path / "killed")
    assert 0 < len(encoded) < whole
    assert content(tmp_path / "straight") == content(tmp_path / "killed")
    assert before.identity == after.identity and not begun.exists()


@pytest.mark.usefixtures("small_chunks")
def test_what_was_begun_and_is_cut_is_made_anew(tmp_path, encoded):
    made = recipe(write_rows(tmp_path / "rows.jsonl"))
    prepare(made, tmp_path / "straight")
    whole = len(encoded)
    killed(tmp_path, "task=pretrain")
    (begun,) = (tmp_path / "killed").glob(".tokens-*.building")
    (begun / "tokens.bin").write_bytes(b"cut")
    encoded.clear()
    prepare(made, tmp_path / "killed")
    assert len(encoded) == whole and content(tmp_path / "straight") == content(tmp_path / "killed")


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("size", "smaller"), [("CHUNK_ROWS", 8), ("CHUNK_CHARACTERS", 400)])
@pytest.mark.slow
def test_what_was_begun_in_chunks_of_another_size_is_not_gone_on_with(
    tmp_path, monkeypatch, encoded, size, smaller
):
    made = recipe(write_rows(tmp_path / "rows.jsonl"))
    prepare(made, tmp_path / "straight")
    whole = len(encoded)
    killed(tmp_path, "task=pretrain")
    monkeypatch.setattr(tokenization, size, smaller)
    encoded.clear()
    prepare(made, tmp_path / "killed")
    assert len(encoded) == whole and content(tmp_path / "straight") == content(tmp_path / "killed")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.slow
def test_workers_end_with_who_started_them(tmp_path):
    write_rows(tmp_path / "rows.jsonl")
    children = killed(tmp_path, "task=pretrain", "workers")
    assert children and gone(children, 20)


COUNTING = """
import sys
from pathlib import Path
from bundle.data import prepare
from bundle.data.tokenizers import ByteTokenizer
from tests.data.test_cache import recipe
counted = []
def encode(self, texts, original=ByteTokenizer.encode):
    counted.extend(texts)
    return original(self, texts)
ByteTokenizer.encode = encode
corpus = prepare(recipe(Path("rows.jsonl").absolute()), Path("data").absolute())
print(corpus.identity["tokens"], len(counted))
"""


@pytest.mark.slow
def test_many_at_once_make_it_once(tmp_path, encoded):
    made = recipe(write_rows(tmp_path / "rows.jsonl"))
    alone = prepare(made, tmp_path / "alone")
    pipe, environment = subprocess.PIPE, os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", COUNTING]
    started = [
        subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=pipe, text=True) for _ in "123"
    ]
    found = [process.communicate(timeout=200)[0].split() for process in started]
    assert {tokens for tokens, _ in found} == {alone.identity["tokens"]}
    assert sorted(int(count) for _, count in found) == [0, 0, len(encoded)]
    assert content(tmp_path / "data") == content(tmp_path / "alone")


def test_who_waited_takes_what_was_made_meanwhile(tmp_path, monkeypatch, encoded):
    made = recipe(write_rows(tmp_path / "rows.jsonl"))
    prepare(made, tmp_path / "data")
    encoded.clear()
    first, look = [None], store.open_store  # at its first look there was nothing yet
    monkeypatch.setattr(cache, "open_store", lambda path: first.pop() if first else look(path))
    prepare(made, tmp_path / "data")
    assert not first and not encoded


def test_the_same_content_anywhere_is_the_same_data_and_any_other_is_not(tmp_path, encoded):
    path = write_rows(tmp_path / "rows.jsonl")
    prepare(recipe(path), tmp_path / "data")
    encoded.clear()
    (tmp_path / "else").mkdir()
    shutil.copy(path, tmp_path / "else" / "moved.jsonl")
    prepare(
        recipe(tmp_path / "else" / "moved.jsonl", "train.steps=70", "seed=1", "data.packed=false"),
        tmp_path / "data",
    )
    assert not encoded
    path.write_text(path.read_text().replace("xx", "yx", 1))
    prepare(recipe(path), tmp_path / "data")
    assert encoded
    encoded.clear()
    prepare(recipe(path, "data.fields.text=response"), tmp_path / "data")
    assert encoded


def test_neighbours_share_tokens_unless_the_recipe_says_where_they_lie(tmp_path):
    made = recipe(tmp_path / "rows.jsonl")
    assert (
        choose_cross_run_cache_directory(made, tmp_path / "a")
        == choose_cross_run_cache_directory(made, tmp_path / "b")
        == tmp_path / ".tokens"
    )
    named = Path("/some/where")
    assert (
        choose_cross_run_cache_directory(recipe(tmp_path / "x", f"data.cache={named}"), tmp_path / "a")
        == named
    )
    (tmp_path / "file").write_text("")
    assert (
        choose_cross_run_cache_directory(made, tmp_path / "file" / "run")
        == tmp_path / "file" / "run" / "data"
    )


@pytest.mark.parametrize("begun", [False, True])
def test_tokens_of_another_user_are_refused(tmp_path, monkeypatch, begun):
    made = recipe(write_rows(tmp_path / "rows.jsonl"))
    prepare(made, tmp_path / "data")
    (path,) = (tmp_path / "data").glob("tokens-*")
    path = path.rename(store.build_partial_path(path)) if begun else path
    if os.geteuid() == 0:  # whose tokens anybody trusts
        os.chown(path, 4242, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(JobFailed, match=r"data\.cache") as error:
        prepare(made, tmp_path / "data")
    assert f"user {path.stat().st_uid}" in str(error.value)
    assert path.exists()


def test_who_waits_tells_what_the_other_has_made(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_POLL_SECONDS", 0.05)
    told: list[int] = []
    path = tmp_path / "tokens-x"
    store.build_partial_path(path).mkdir()

    def wait():
        with cache._hold_store_lock(path, told.append):
            told.append(-1)

    with cache._hold_store_lock(path, told.append):
        waiting = threading.Thread(target=wait)
        waiting.start()
        for size in (0, 20, 60):
            (store.build_partial_path(path) / "tokens.bin").write_bytes(bytes(size))
            time.sleep(0.5)
    waiting.join()
    assert told[-1] == -1 and told[:-1] == sorted(told[:-1]) and 30 in told


def test_what_the_other_takes_away_while_somebody_waits_is_no_error(tmp_path, monkeypatch):
    """It has finished, or failed, between two looks at what it has made."""
    monkeypatch.setattr(cache, "_POLL_SECONDS", 0.05)
    told: list[int] = []
    path = tmp_path / "tokens-x"
    begun = store.build_partial_path(path) / "tokens.bin"
    begun.parent.mkdir()
    begun.write_bytes(bytes(20))
    look = Path.stat

    def last_look(of, **options):
        found = look(of, **options)
        if of == begun:
            begun.unlink()
        return found

    monkeypatch.setattr(Path, "stat", last_look)
    held = path.with_name(f".{path.name}.lock").open("a")
    fcntl.flock(held, fcntl.LOCK_EX)
    threading.Timer(0.5, held.close).start()
    with cache._hold_store_lock(path, told.append):
        assert not begun.exists() and told == [10]


def test_another_limit_takes_the_same_tokens_until_a_row_is_longer(tmp_path, encoded):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "?", "response": "x" * n}) + "\n" for n in (9, 40)))
    keys = ("task=sft", "data.on_error=stop", "data.validation=0")
    longest = [
        int(prepare(recipe(rows, *keys, f"data.sequence_length={limit}"), tmp_path).stores[0].lengths.max())
        for limit in (256, 128, 96)
    ]
    assert len(set(longest)) == 1 and len(list(tmp_path.glob("tokens-*"))) == 1
    with pytest.raises(UsageError, match=r"rows.jsonl:2"):
        prepare(recipe(rows, *keys, "data.sequence_length=48"), tmp_path)
    once = len(encoded)
    skipping = recipe(rows, *keys, "data.on_error=skip", "data.sequence_length=48")
    assert prepare(skipping, tmp_path).left_out.skipped == 1 and len(encoded) > once


FACTS = {"prefix", "sha256", "masked", "pictured", "moving", "grouped"}


def test_a_store_of_other_facts_has_another_format(tmp_path):
    """A store of another format has another name: no release reads facts that an older one did not write."""
    asked = recipe(write_rows(tmp_path / "rows.jsonl"))
    prepare(asked, tmp_path / "tokens", lambda _: None)
    (written,) = (tmp_path / "tokens").glob("tokens-*/facts.json")
    facts = set(json.loads(written.read_text())) - set(DataErrors("stop").summarize_or_raise_by_policy())
    assert (cache.STORE_FORMAT, facts) == (9, FACTS), "raise cache.STORE_FORMAT with the facts of a store"
