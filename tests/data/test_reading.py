"""Files as they come: corrupt ones are named by file, line and field, all at once."""

import argparse
import itertools
import json
import re
import string

import numpy as np
import pytest

from bundle.data import prepare
from bundle.data.sources import ReasonCounter
from bundle.data.tokenizers import ByteTokenizer
from bundle.errors import UsageError
from bundle.recipe import load
from bundle.recipe.datafiles import expand
from tests.data import chat

GOOD = {"text": "def f():\n    return 1\n" * 10}


def recipe(path, *overrides, source="jsonl"):
    where = [f"data.source={source}", f"data.path={path}", "data.sequence_length=32"]
    return load("demo", [*where, *overrides])


def corrupt(tmp_path, made):
    with pytest.raises(UsageError) as caught:
        prepare(made, tmp_path / "cache")
    assert caught.value.code == 2
    assert not list((tmp_path / "cache").glob("*/")), "nothing may stay of a refused store"
    return caught.value.violations


BAD_LINES = [
    ('{"text": ', "not JSON"),
    ('[{"text": "x"},', "not JSON"),
    ("[1]", "list"),
    ('{"txt": "x"}', "txt"),
    ('{"text": 3}', "is 3"),
    ('{"text": "  "}', "field text"),
    ('{"text": null}', "is None"),
    ("[" * 100_000, "nested"),
    ("{}", "no fields"),
]


def test_all_bad_lines_are_named_at_once(tmp_path, messages):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps(GOOD), *(line for line, _ in BAD_LINES), json.dumps(GOOD)]))
    found = corrupt(tmp_path, recipe(path))
    for number, (_, reason) in enumerate(BAD_LINES, start=2):
        (line,) = [line for line in found if re.search(rf"{path}:{number}[:,]", line)]
        assert reason in line
    messages("\n".join(line for line in found if "not JSON" not in line))


def test_bytes_that_are_no_text_are_named_by_line(tmp_path, messages):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"text": "\xff"}\n')
    line = corrupt(tmp_path, recipe(path))[0]
    assert line.startswith(f"{path}:2: ") and "0xff" in line
    messages(line)
    path = tmp_path / "b.txt"
    path.write_bytes(b"fine\nfine\n\xfe\n")
    line = corrupt(tmp_path, recipe(path, source="text"))[0]
    assert line.startswith(f"{path}:3: ") and "0xfe" in line


def test_empty_files_are_named(tmp_path):
    for name, source in (("a.jsonl", "jsonl"), ("b.txt", "text")):
        (tmp_path / name).write_text("\n")
        assert corrupt(tmp_path, recipe(tmp_path / name, source=source)) == (f"{tmp_path / name}: empty",)


def test_a_byte_order_mark_is_no_text(tmp_path):
    bom = b"\xef\xbb\xbf"
    (tmp_path / "a.jsonl").write_bytes(bom + json.dumps(GOOD).encode() + b"\n" + bom + b"{}\n")
    assert [line.split(": ")[0] for line in corrupt(tmp_path, recipe(tmp_path / "a.jsonl"))] == [
        f"{tmp_path / 'a.jsonl'}:2"
    ]
    (tmp_path / "b.txt").write_bytes(bom + b"four" * 40)
    corpus = prepare(recipe(tmp_path / "b.txt", "data.validation=0", source="text"), tmp_path / "cache")
    assert bytes(corpus.stores[0].ids[:5].tolist()) == b"fourf"


def test_an_object_over_several_lines_gets_one_complaint(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD, indent=1))
    (line,) = corrupt(tmp_path, recipe(path))
    assert line.startswith(f"{path}: ") and "one object a line" in line


def test_a_first_row_that_is_cut_does_not_condemn_the_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "x\n' + "\n".join([json.dumps(GOOD)] * 9))
    corpus = prepare(recipe(path, "data.on_error=skip", "data.validation=0"), tmp_path / "cache")
    assert len(corpus.stores[0].lengths) == 9 and len(corpus.left_out.skipped_rows) == 1


def test_ids_that_the_model_does_not_have_are_named_by_row(tmp_path, monkeypatch, messages):
    """A tokenizer may give ids that are not among those that it says it has."""
    right = ByteTokenizer.encode
    monkeypatch.setattr(
        ByteTokenizer,
        "encode",
        lambda of, texts: [np.where(ids == 195, 258, ids) for ids in right(of, texts)],
    )
    (tmp_path / "a.txt").write_text("one\n\n\nñ\n\n\ntwo\n\n\n\n\n\nthree\n\né\n\n\n")
    made = recipe(tmp_path / "a.txt", r'data.separator="\n\n\n"', source="text")
    (line,) = corrupt(tmp_path, made)
    assert line.startswith(f"{tmp_path}/a.txt:4, {tmp_path}/a.txt:13: token 258 ")
    messages(line)
    rows = [{"prompt": "q", "response": said, "text": said} for said in ("a", "é", "b")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for task in ("pretrain", "sft"):
        (line,) = corrupt(tmp_path, recipe(tmp_path / "rows.jsonl", f"task={task}"))
        assert line.startswith(f"{tmp_path}/rows.jsonl:2: token 258 ")


def test_rows_of_which_nothing_would_be_learned_are_named(tmp_path):
    tokenizer = chat.directory(tmp_path / "tokenizer", chat.BARE, merged=("qa",))
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "q", "response": said} for said in ("b", "a", "ab")]
    path.write_text("\n".join(map(json.dumps, rows)))
    keys = [f"data.tokenizer=hf:{tokenizer}", "data.template=chat", "task=sft"]
    (line,) = corrupt(tmp_path, recipe(path, *keys))
    assert line.startswith(f"{path}:2: ") and "trained on" in line


def test_what_a_template_refuses_is_named_by_row_and_can_be_skipped(tmp_path):
    tokenizer = chat.directory(tmp_path / "tokenizer", chat.ALTERNATING)
    path = tmp_path / "rows.jsonl"
    good = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [good, [{"role": "system", "content": "s"}, *good], good, good[1:], good]
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in rows))
    keys = [f"data.tokenizer=hf:{tokenizer}", "data.template=chat", "task=sft", "data.validation=0"]
    (line,) = corrupt(tmp_path, recipe(path, *keys))
    assert line.startswith(f"{path}:2, {path}:4: ") and line.endswith(chat.REFUSAL)
    corpus = prepare(recipe(path, *keys, "data.on_error=skip"), tmp_path / "cache")
    assert len(corpus.stores[0].lengths) == 3 and corpus.left_out.skipped == 2


def test_a_reason_is_told_once_with_a_count_and_the_first_places(tmp_path, messages):
    """As where the recipe names a column that no row has."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(["x", *[json.dumps({"content": "y"})] * 6000, "x"]))
    not_json, lacks_text = corrupt(tmp_path, recipe(path))
    assert not_json.startswith(f"{path}:1, {path}:6002: ")
    assert lacks_text.startswith(f"{path}:2, {path}:3, {path}:4 and 5,997 more: ") and "content" in lacks_text
    messages(lacks_text)


def test_a_limit_keeps_the_message_short_and_counts_the_rest(tmp_path):
    path = tmp_path / "rows.jsonl"
    names = ["".join(pair) for pair in itertools.product(string.ascii_lowercase, repeat=2)][:500]
    path.write_text("\n".join(json.dumps({name: ""}) for name in names * 2))
    found = corrupt(tmp_path, recipe(path))
    assert len(found) == 21 and found[-1] == "and 960 more"
    assert found[0].startswith(f"{path}:1, {path}:501: ") and found[0].endswith(" aa)")


def test_reasons_that_differ_in_values_alone_are_one_cause():
    counted, file = ReasonCounter(), "a.jsonl"
    for n in range(60):
        counted.add(f"{file}:{n + 1}", f"image 'images/{n}.png': gone")
    counted.add(f"{file}:61", "image 'images/60.png': denied")
    whole = ReasonCounter()
    whole.extend(*json.loads(json.dumps(counted.dump())))
    first, second = whole.format_lines()
    assert first.startswith(f"{file}:1, {file}:2, {file}:3 and 57 more: ") and "0.png': gone" in first
    assert second.startswith(f"{file}:61: ") and second.endswith("60.png': denied")
    assert whole.count == 61 and whole.unlisted_row_count == 0


def test_skipping_counts_and_goes_on_also_from_the_cache(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps(GOOD)] * 5 + ["x"] * 30))
    made = recipe(path, "data.on_error=skip", "data.validation=0")
    for _ in range(2):
        corpus = prepare(made, tmp_path / "cache")
        (line,) = corpus.left_out.skipped_rows
        assert corpus.left_out.skipped == 30
        assert line.startswith(f"{path}:6, {path}:7, {path}:8 and 27 more: ")
        assert len(corpus.stores[0].lengths) == 5


def test_parquet_is_read(tmp_path):
    pa = pytest.importorskip("pyarrow", exc_type=ImportError)
    parquet = pytest.importorskip("pyarrow.parquet", exc_type=ImportError)
    good = tmp_path / "good.parquet"
    parquet.write_table(pa.table({"text": [GOOD["text"]] * 9, "other": [1] * 9}), good)
    corpus = prepare(recipe(good, "data.validation=0", source="parquet"), tmp_path / "cache")
    assert len(corpus.stores[0].lengths) == 9


def test_faults_of_parquet_files_are_named_at_once(tmp_path):
    pa = pytest.importorskip("pyarrow", exc_type=ImportError)
    parquet = pytest.importorskip("pyarrow.parquet", exc_type=ImportError)
    directory = tmp_path / "files"
    directory.mkdir()
    parquet.write_table(pa.table({"text": ["x" * 100, None, "y" * 100]}), directory / "a-null.parquet")
    parquet.write_table(pa.table({"body": ["x"]}), directory / "b-column.parquet")
    parquet.write_table(pa.table({"text": pa.array([], pa.string())}), directory / "c-empty.parquet")
    whole = (directory / "a-null.parquet").read_bytes()
    (directory / "d-cut.parquet").write_bytes(whole[: len(whole) // 2])
    found = corrupt(tmp_path, recipe(directory, source="parquet"))
    assert [line.removeprefix(str(directory)).split(": ")[0] for line in found] == [
        "/a-null.parquet:2",
        "/b-column.parquet",
        "/c-empty.parquet",
        "/d-cut.parquet",
    ]
    assert "it has body" in found[1] and "read as parquet" in found[3]


def test_paths_mean_files_directories_globs_and_each_file_once(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl", "notes.txt", ".hidden.jsonl"):
        (tmp_path / name).write_text("x")
    everything = [str(tmp_path / "b.jsonl"), str(tmp_path), str(tmp_path / "*.jsonl")]
    assert [s.path.name for s in expand(everything, "jsonl")] == ["b.jsonl", "a.jsonl", "c.jsonl"]
    assert [s.path.name for s in expand([str(tmp_path / "**" / "*.txt")], "text")] == ["notes.txt"]


def test_every_path_without_files_is_named(tmp_path):
    (tmp_path / "dir").mkdir()
    with pytest.raises(UsageError) as caught:
        expand(["/nowhere/x", str(tmp_path / "dir"), str(tmp_path / "*.jsonl")], "jsonl")
    assert caught.value.code == 2 and len(caught.value.violations) == 3
    assert "ending in .jsonl" in caught.value.violations[1]


def test_the_standard_library_is_the_same_list_every_time_and_has_no_tests():
    sources = expand(["stdlib"], "text")
    names = [source.name for source in sources]
    assert names == [source.name for source in expand(["stdlib"], "text")] and len(names) > 300
    for module in (argparse, json.decoder):
        assert f"stdlib/{module.__name__.replace('.', '/')}.py" in names
    assert not [name for name in names if "/test/" in name or "/site-packages/" in name]


def test_separators_divide_files_into_documents(tmp_path):
    (tmp_path / "a.txt").write_text("one and one\n\n\ntwo and two\n\n\n\n\n\nthree and three" * 9)
    made = recipe(tmp_path / "a.txt", r'data.separator="\n\n\n"', "data.validation=0", source="text")
    corpus = prepare(made, tmp_path / "cache")
    assert len(corpus.stores[0].lengths) == 2 * 9 + 1
    assert bytes(corpus.stores[0].ids[:11].astype("uint8").tolist()) == b"one and one"
