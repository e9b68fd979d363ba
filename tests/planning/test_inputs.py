"""Tokenizers that are larger than the model are found in their files."""

import json

import pytest

from bundle.planning.inputs import find_input_output_problems
from bundle.recipe import load


def said(directory, name):
    """What is said of the vocabulary before any rank starts."""
    found = find_input_output_problems(load("demo", [f"data.tokenizer={name}"]), directory / "run")
    return [problem.text for problem in found if "vocab_size" in problem.text]


def problems(directory, content):
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return said(directory, f"hf:{directory}")


@pytest.mark.parametrize(
    "written",
    [
        {"model": {"vocab": {"a": 0, "b": 300}}},
        {"model": {"vocab": [["a", -1.5]] * 301}},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 300, "content": "<x>"}, {"id": 7}]},
    ],
)
def test_the_highest_id_must_be_one_of_the_models(tmp_path, written, messages):
    (text,) = problems(tmp_path / "t", written)
    size = load("demo").architecture.vocab_size
    assert str(tmp_path / "t") in text and " 300" in text and str(size) in text
    messages(text)
    fits = json.loads(json.dumps(written).replace("300", str(size - 1)))
    if isinstance(fits["model"]["vocab"], list):
        fits["model"]["vocab"] = fits["model"]["vocab"][:size]
    assert problems(tmp_path / "t", fits) == []
    assert len(problems(tmp_path / "t", {"model": {"vocab": {"a": size}}})) == 1


@pytest.mark.parametrize(
    "odd",
    ["", "[]", "{}", "[" * 100_000, '{"model": {"vocab": 3}}', '{"model": {"vocab": {"a": "b"}}}', "\0"],
)
def test_files_that_say_nothing_of_it_are_left_to_the_ranks(tmp_path, odd):
    assert problems(tmp_path / "t", odd) == []
    assert said(tmp_path, f"hf:{tmp_path}/none") == said(tmp_path, "bytes") == []


def test_a_tokenizer_of_tiktokens_is_named_in_the_plan(tmp_path, messages):
    def find_refusals():
        found = find_input_output_problems(load("demo", [f"data.tokenizer=hf:{tmp_path}"]), tmp_path / "run")
        return [problem.text for problem in found if "tiktoken" in problem.text]

    (tmp_path / "tiktoken.model").touch()
    (refusal,) = find_refusals()
    messages(refusal)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert find_refusals() == []


def test_data_that_is_not_there_is_named_by_its_key(tmp_path, messages):
    gone = {"data.path": tmp_path / "a", "data.validation_sets.own.path": tmp_path / "b"}
    recipe = load("demo", [f"{key}={path}" for key, path in gone.items()])
    found = [problem.text for problem in find_input_output_problems(recipe, tmp_path / "run")]
    assert [text.partition(":")[0] for text in found] == [f"{key} '{path}'" for key, path in gone.items()]
    messages("\n".join(found))
