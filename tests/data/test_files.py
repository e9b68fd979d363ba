"""Kinds of data files, found by their names, and the rows of each."""

import gzip
import json
import random
from typing import Any

import pytest

from bundle.data import prepare, sources
from bundle.data.sources import DataErrors, read_rows
from bundle.errors import UsageError
from bundle.planning.inputs import find_input_output_problems
from bundle.recipe import load
from bundle.recipe.datafiles import expand

ROWS: list[dict[str, Any]] = [
    {"text": 'a, ]} é \\ " \U0001f600'},
    {"text": "b", "n": [1, {"x": [None, -1.5e-7, True]}]},
    {"text": ""},
]


def read(*paths, kind=None, wanted=("text", "n")):
    """(lines, rows, complaints) of some files."""
    errors = DataErrors("stop")
    found = list(read_rows(expand([str(path) for path in paths], kind), wanted, errors))
    return (
        [int(place.rpartition(":")[2]) for place, _ in found],
        [row for _, row in found],
        errors.corrupt.format_lines(),
    )


def lines(values):
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def parquet(path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS), path)


def arrow(path, has_footer=False, values=ROWS):
    pa = pytest.importorskip("pyarrow")
    table = pa.Table.from_pylist(values)
    with (pa.ipc.new_file if has_footer else pa.ipc.new_stream)(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def zstd(path):
    pa = pytest.importorskip("pyarrow")
    with pa.OSFile(str(path), "wb") as file, pa.CompressedOutputStream(file, "zstd") as packed:
        packed.write(lines(ROWS))


WRITERS = {
    "rows.jsonl": lambda path: path.write_bytes(lines(ROWS)),
    "rows.json": lambda path: path.write_text(json.dumps(ROWS)),
    "lines.json": lambda path: path.write_bytes(lines(ROWS)),
    "rows.ndjson": lambda path: path.write_bytes(lines(ROWS)),
    "rows.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines(ROWS))),
    "rows.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(ROWS, indent=2).encode())),
    "rows.jsonl.zst": zstd,
    "rows.parquet": parquet,
    "rows.arrow": arrow,
    "footer.arrow": lambda path: arrow(path, has_footer=True),
}


@pytest.mark.parametrize("name", WRITERS)
def test_rows_are_the_same_in_files_of_any_kind(tmp_path, name):
    WRITERS[name](tmp_path / name)
    numbers, found, complaints = read(tmp_path / name)
    is_table = name.endswith((".parquet", ".arrow"))
    filled = [{"text": row["text"], "n": row.get("n")} for row in ROWS]
    assert complaints == []
    if is_table:  # a column of mixed lists is none that a table has
        assert [row["text"] for row in found] == [row["text"] for row in filled]
    else:
        assert found == ROWS
    assert is_table or name == "rows.json" or numbers == ([2, 5, 18] if name == "rows.json.gz" else [1, 2, 3])


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
def test_an_array_is_read_in_parts_of_any_size(tmp_path, monkeypatch, block):
    monkeypatch.setattr(sources, "_JSON_BLOCK_CHARACTERS", block)
    draw = random.Random(block)
    values = [
        {"text": "x" * draw.randrange(300), "n": draw.random(), "é\n": ["]", {"a": "},{"}]} for _ in range(40)
    ]
    for indent in (None, 1, 3):
        text = "\n \n" + json.dumps(values, indent=indent, ensure_ascii=bool(indent)) + "\n"
        (tmp_path / "rows.json").write_text(text)
        numbers, found, complaints = read(tmp_path / "rows.json")
        assert (found, complaints) == (values, [])
        begins = [
            number for number, line in enumerate(text.split("\n"), 1) if line == " " * (indent or 0) + "{"
        ]
        assert numbers == (begins if indent is not None else [3] * len(values))
    (tmp_path / "rows.json").write_text(" [ ] ")
    assert read(tmp_path / "rows.json")[1:] == ([], [f"{tmp_path}/rows.json: empty"])


@pytest.mark.parametrize(
    ("text", "before", "line", "why"),
    [
        ('[{"text": "x"},\n{"text": }]', 1, 2, "not JSON"),
        ('[{"text": "x"}\n{"text": "y"}]', 1, 1, "comma"),
        ('[{"text": "x"},\n', 1, 2, "not JSON"),
        ('[{"text": "x"}\n', 1, 1, "no end"),
        ('[{"text": "x"}]\n{"text": "y"}', 1, 2, "more follows"),
        ('[{"text": "x"},\n7]', 1, 2, "int"),
        ('[\n' + '{"a":' * 100_000, 0, 2, "nested"),
        ('[{"text": "x"},]', 1, 1, "not JSON"),
    ],
)  # fmt: skip
def test_a_broken_array_is_named_by_its_line(tmp_path, text, before, line, why):
    (tmp_path / "rows.json").write_text(text)
    _, found, (complaint,) = read(tmp_path / "rows.json")
    assert (
        len(found) == before and complaint.startswith(f"{tmp_path}/rows.json:{line}: ") and why in complaint
    )


@pytest.mark.parametrize("name", ["a.jsonl.gz", "b.jsonl.zst", "c.arrow", "d.parquet"])
def test_packed_files_and_tables_that_are_cut_are_named(tmp_path, name):
    path = tmp_path / name
    WRITERS["rows" + name[1:]](path)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"garbage" * 9):
        path.write_bytes(content)
        (complaint,) = read(path)[2]
        assert complaint.startswith(f"{path}: ") and "None" not in complaint


def test_a_damaged_arrow_file_is_refused_before_its_rows_are_read(tmp_path):
    """Offsets beyond the buffer would be read as somebody's memory."""
    path = tmp_path / "rows.arrow"
    arrow(path, values=[{"text": "abcdefgh"}] * 2)
    content = path.read_bytes()
    offsets = (0).to_bytes(4, "little") + (8).to_bytes(4, "little") + (16).to_bytes(4, "little")
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, offsets[:8] + (2**30).to_bytes(4, "little")))
    _, found, (complaint,) = read(path)
    assert found == [] and "read as arrow" in complaint


def save_to_disk(directory, parts):
    """As `datasets` writes a data set: parts in the order of state.json, whatever their names."""
    directory.mkdir(parents=True)
    for name, values in parts.items():
        arrow(directory / name, values=values)
    state = {"_data_files": [{"filename": name} for name in parts], "_fingerprint": "0", "_split": "train"}
    (directory / "state.json").write_text(json.dumps(state))
    (directory / "dataset_info.json").write_text("{}")


def test_a_directory_of_datasets_is_read_in_its_order(tmp_path):
    saved = tmp_path / "saved"
    save_to_disk(saved, {"data-1.arrow": [{"text": "b"}], "data-0.arrow": [{"text": "a"}]})
    assert [row["text"] for row in read(saved)[1]] == ["b", "a"]
    assert {source.kind for source in expand([str(saved)], None)} == {"arrow"}
    split = tmp_path / "splits"
    save_to_disk(split / "train", {"data-0.arrow": [{"text": "t"}]})
    save_to_disk(split / "test", {"data-0.arrow": [{"text": "held out"}]})
    (split / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UsageError) as caught:
        expand([str(split)], None)
    (violation,) = caught.value.violations
    assert "train, test" in violation and str(split / "train") in violation
    (split / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert [row["text"] for row in read(split)[1]] == ["t"]
    for state in ('{"_data_files": [{"filename": "../x.arrow"}]}', "{", "[]", '{"_data_files": [3]}'):
        (saved / "state.json").write_text(state)
        with pytest.raises(UsageError) as caught:
            expand([str(saved)], None)
        assert "state.json" in caught.value.violations[0]


def test_a_kind_is_found_by_names_and_there_is_one(tmp_path):
    for name in ("a.txt", "b.jsonl", "c.json", "d.parquet", "e.csv", "dataset_infos.json"):
        (tmp_path / name).write_text("x")

    def kinds(*names, kind=None):
        return [
            (each.path.name, each.kind) for each in expand([str(tmp_path / name) for name in names], kind)
        ]

    assert kinds("a.txt") == [("a.txt", "text")] and kinds("b.jsonl", "c.json")[1] == ("c.json", "jsonl")
    assert kinds("e.csv", kind="text") == [("e.csv", "text")]
    assert [source.kind for source in expand(["stdlib"], None)][:1] == ["text"]
    for names, named in ((["a.txt", "*.jsonl"], ("text", "jsonl")), ([""], ("text", "parquet"))):
        with pytest.raises(UsageError) as caught:
            kinds(*names)
        assert all(f"({kind})" in caught.value.violations[-1] for kind in named)
    with pytest.raises(UsageError) as caught:
        kinds("e.csv")
    assert "data.source" in caught.value.violations[0]
    (tmp_path / "tokens.idx").write_text("x")
    (tmp_path / "tokens.bin").write_text("x")
    for name in ("tokens", "tokens.bin", "tokens.idx"):
        assert kinds(name) == [("tokens.idx", "megatron")]


def job(*keys):
    return load("demo", ["data.source=null", "data.validation=0", "data.sequence_length=8", *keys])


def test_tokens_are_the_same_whether_the_kind_is_found_or_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": "hello there, this is a text"}]))
    found = prepare(job(f"data.path={tmp_path}/a.jsonl"), tmp_path / "tokens")
    named = prepare(job(f"data.path={tmp_path}/a.jsonl", "data.source=jsonl"), tmp_path / "tokens")
    assert found.identity == named.identity and len(list((tmp_path / "tokens").glob("tokens-*"))) == 1


def test_a_blend_may_have_sets_of_different_kinds(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": "hello there, this is a text"}]))
    (tmp_path / "b.txt").write_text("hello there, this is another text")
    keys = [f"data.path=[{tmp_path}/a.jsonl, {tmp_path}/b.txt]", "data.weights=[1, 2]"]
    assert not list(find_input_output_problems(job(*keys), tmp_path / "run"))
    assert len(prepare(job(*keys), tmp_path / "tokens").stores) == 2
    problems = list(find_input_output_problems(job(*keys[:1]), tmp_path / "run"))
    assert len(problems) == 1 and "b.txt (text)" in problems[0].text


def test_text_is_not_for_conversations_also_where_its_kind_is_found(tmp_path):
    (tmp_path / "b.txt").write_text("hello")
    for task in ("sft", "dpo"):
        (problem,) = find_input_output_problems(
            job(f"task={task}", f"data.path={tmp_path}/b.txt"), tmp_path / "run"
        )
        assert problem.text.startswith("data.path: ") and "jsonl" in problem.text
