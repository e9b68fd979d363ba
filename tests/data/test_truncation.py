"""SFT rows of more tokens than a sample has room for: refused, left out or cut, and always told."""

import json
import re

import numpy as np
import pytest

from bundle.checkpoints.state import list_data_changes
from bundle.data import prepare
from bundle.data.corpus import inspect
from bundle.errors import UsageError
from bundle.recipe import load
from tests.data.test_inspection import check

LENGTH = 64
HEAD = len("### User\n\n### Assistant\n")
# (characters of the question, of the answer): two that fit, one by a token too long, two far too long.
SIZES = [(5, 5), (20, LENGTH - HEAD - 20 - 2), (20, LENGTH - HEAD - 20 - 1), (10, 200), (200, 10)]


@pytest.fixture
def rows(tmp_path):
    lines = [json.dumps({"prompt": "q" * asked, "response": "a" * said}) for asked, said in SIZES]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    return path


def recipe(rows, *overrides):
    keys = [f"data.path={rows}", "data.source=jsonl", "data.validation=0", f"data.sequence_length={LENGTH}"]
    return load("demo", ["task=sft", *keys, *overrides])


def long(rows):
    """The places of the last three, with their tokens."""
    far = HEAD + 212
    return f"{rows}:3 ({LENGTH + 1} tokens), {rows}:4 ({far} tokens), {rows}:5 ({far} tokens)"


def documents(corpus):
    """(ids, which are learned) of each, as text: what is learned in capitals."""
    (store,) = corpus.stores
    found = []
    for start, length in zip(store.document_starts, store.lengths, strict=True):
        ids, learned = (column[start : start + length] for column in (store.ids, store.loss_mask))
        text = "".join("$" if i == 256 else chr(i) for i in ids)
        found.append(
            "".join(c.upper() if is_learned else c for c, is_learned in zip(text, learned, strict=True))
        )
    return found


def whole(asked, said):
    return f"### User\n{'q' * asked}\n### Assistant\n{'A' * said}\n$"


def test_long_rows_are_refused_where_nobody_says_otherwise(rows, tmp_path, messages):
    with pytest.raises(UsageError) as caught:
        prepare(recipe(rows), tmp_path / "data")
    (line,) = caught.value.violations
    assert line.startswith(f"{long(rows)}: ") and "data.truncation" in line
    messages(line)


def test_long_rows_can_be_left_out_and_are_counted_also_from_the_cache(rows, tmp_path):
    for _ in range(2):
        corpus = prepare(recipe(rows, "data.truncation=delete"), tmp_path / "data")
        assert list(map(str.lower, documents(corpus))) == [whole(*sizes).lower() for sizes in SIZES[:2]]
        assert (corpus.left_out.deleted, corpus.left_out.cut, corpus.left_out.skipped) == (3, 0, 0)
        assert [line.split(": ")[0] for line in corpus.left_out.long_rows] == [long(rows)]
        assert all(line.endswith("; deleted") for line in corpus.left_out.long_rows)


@pytest.mark.parametrize(("side", "kept"), [("right", [0, 1, 2, 3]), ("left", [0, 1, 2, 3, 4])])
def test_long_rows_can_be_cut_on_either_side_with_their_mask(rows, tmp_path, side, kept):
    corpus = prepare(recipe(rows, f"data.truncation={side}"), tmp_path / "data")
    texts = [whole(*SIZES[index]) for index in kept]
    assert documents(corpus) == [text[:LENGTH] if side == "right" else text[-LENGTH:] for text in texts]
    assert (corpus.left_out.deleted, corpus.left_out.cut) == (5 - len(kept), len(kept) - 2)
    batch = corpus.training.build_batch(np.arange(len(kept)))
    assert (batch.loss_mask.sum(1) > 0).all()


def test_a_row_of_which_nothing_learned_is_left_is_deleted_and_told(rows, tmp_path, messages):
    corpus = prepare(recipe(rows, "data.truncation=right"), tmp_path / "data")
    assert corpus.left_out.deleted == 1
    (line,) = [line for line in corpus.left_out.long_rows if "deleted" in line]
    assert line.startswith(f"{rows}:5 ({HEAD + 212} tokens): ")
    messages(line)


def test_a_pack_has_room_for_what_it_holds(rows, tmp_path):
    keys = ("data.packed=true", "train.micro_batch_size=1", "data.truncation=left")
    corpus = prepare(recipe(rows, *keys, "data.sequence_length=72"), tmp_path / "data")
    room = 64  # the next multiple below
    assert max(corpus.stores[0].lengths) == room and corpus.left_out.cut == 3


@pytest.mark.parametrize("task", ["sft", "pretrain"])
def test_a_pack_may_be_longer_than_the_models_positions_but_no_sequence_of_it(rows, tmp_path, task):
    """40 positions: rows are cut there and running text comes in pieces of as many; a pack holds several."""
    if task == "pretrain":
        rows.write_text(json.dumps({"text": "x" * 1010}))
    keys = [f"task={task}", "data.packed=true", "train.micro_batch_size=1", "data.truncation=left"]
    made = recipe(rows, "data.sequence_length=192", "model.config.max_position_embeddings=40", *keys)
    corpus = prepare(made, tmp_path / "data")
    packs = [corpus.training.build_batch(np.array([number])) for number in range(len(corpus.training))]
    lengths = [length for pack in packs for length in pack.lengths or ()]
    assert max(lengths) == 40 and max(pack.ids.shape[1] for pack in packs) > 120
    assert max(pack.position_ids.max() for pack in packs) == 39
    assert sum(lengths) == corpus.tokens
    other = recipe(rows, "data.sequence_length=192", "model.config.max_position_embeddings=48", *keys)
    assert len(list_data_changes(corpus.identity, prepare(other, tmp_path / "other").identity)) >= 1


def test_other_truncation_is_other_data(rows, tmp_path):
    right, left = (prepare(recipe(rows, f"data.truncation={side}"), tmp_path) for side in ("right", "left"))
    assert len(list_data_changes(right.identity, left.identity)) == 1


def test_a_corpus_of_which_all_is_deleted_says_so(rows, tmp_path, messages):
    with pytest.raises(UsageError, match=" 5 rows") as caught:
        prepare(recipe(rows, "data.truncation=delete", "data.sequence_length=16"), tmp_path / "data")
    (said,) = caught.value.violations
    assert said.startswith(f"{rows}:1 (") and " and 2 more: " in said and " 16 tokens" in said
    messages(caught.value)


def test_running_text_is_never_too_long(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "x" * 1000}))
    made = load(
        "demo", [f"data.path={path}", "data.source=jsonl", "data.validation=0", "data.sequence_length=16"]
    )
    corpus = prepare(made, tmp_path / "data")
    assert corpus.tokens == 1001 and corpus.left_out.long_rows == ()


def find_counts(output, begins):
    """The only line that begins so, and the numbers in it."""
    (line,) = [line for line in output.splitlines() if line.startswith(begins)]
    return line, list(map(int, re.findall(r"\d+", line)))


@pytest.mark.processes
def test_check_counts_and_names_long_rows(rows, tmp_path, messages):
    made = recipe(rows, "data.truncation=right")
    counts = inspect(made, prepare(made, tmp_path / "data"))
    assert (counts.documents, counts.left_out.deleted, counts.left_out.cut) == (4, 1, 2)
    sets = [
        "task=sft",
        f"data.path={rows}",
        "data.source=jsonl",
        "data.validation=0",
        "data.truncation=right",
    ]
    words = [word for key in [*sets, f"data.sequence_length={LENGTH}"] for word in ("--set", key)]
    done = check("demo", *words, "--run-directory", tmp_path / "run")
    line, numbers = find_counts(done.stdout, "documents ")
    assert numbers == [4, 1, 2]
    messages(line)
    assert [line for line in (3, 4, 5) if f"rows.jsonl:{line} (" in done.stderr] == [3, 4, 5]
    found = json.loads(check("demo", *words, "--run-directory", tmp_path / "run", "--json").stdout)
    assert (found["deleted"], found["cut"], len(found["long_rows"])) == (1, 2, 2)


@pytest.mark.processes
def test_check_counts_and_names_what_is_left_out_of_a_validation_set_by_name(rows, tmp_path, messages):
    fits = json.dumps({"prompt": "q", "response": "a"})
    (tmp_path / "train.jsonl").write_text("\n".join([fits] * 4))
    rows.write_text(rows.read_text() + "\nbroken")
    keys = ["task=sft", f"data.path={tmp_path}/train.jsonl", f"data.validation_sets.own.path={rows}"]
    keys += ["data.source=jsonl", "data.validation=0", "data.truncation=right", "data.on_error=skip"]
    words = [word for key in [*keys, f"data.sequence_length={LENGTH}"] for word in ("--set", key)]
    done = check("demo", *words, "--run-directory", tmp_path / "run")
    assert find_counts(done.stdout, "documents ")[1] == [4]
    line, numbers = find_counts(done.stdout, "evaluated  own: ")
    assert numbers == [4, 1, 1, 2]
    messages(line)
    named = [line for line in done.stderr.splitlines() if line.startswith("  - data.validation_sets.own: ")]
    places = ("rows.jsonl:3 (", "rows.jsonl:4 (", "rows.jsonl:5 (", "rows.jsonl:6: ")
    assert [place for place in places if any(place in line for line in named)] == list(places)
    found = json.loads(check("demo", *words, "--run-directory", tmp_path / "run", "--json").stdout)
    assert (found["skipped"], found["deleted"], found["cut"]) == (0, 0, 0)
    own = found["validation_left_out"]["own"]
    assert (own["skipped"], own["deleted"], own["cut"]) == (1, 1, 2)
    assert (len(own["skipped_rows"]), len(own["long_rows"])) == (1, 2)
