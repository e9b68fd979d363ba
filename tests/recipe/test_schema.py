"""The recipe's JSON schema, by a validator that knows nothing of pydantic."""

import json

import jsonschema
import pytest

from bundle.recipe import Recipe, find_recipe, list_built_in, load
from bundle.recipe.document import parse
from tests.command import run_bundle


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    printed = run_bundle("recipes", "schema", code=0, timeout=60).stdout
    schema = json.loads(printed)
    assert schema["$schema"] == jsonschema.Draft202012Validator.META_SCHEMA["$id"]
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", list_built_in())
def test_every_recipe_that_comes_with_the_package_is_valid(validator, name):
    written = parse(find_recipe(name).read_text(), name).values
    assert not list(validator.iter_errors(written))
    assert not list(validator.iter_errors(load(name).dump())), "a dump names what is null as well"


SHORT = {
    "data": {"source": "jsonl", "path": "rows.jsonl", "sequence_length": 64},
    "parallel": {"tp": 2, "etp": None, "sequence_parallel": None},
    "model": {"path": "/models/any", "fp8": {"scaling": "mxfp8", "format": None}},
    "optimizer": {"lr": 1, "betas": [0.9, 0.99]},
    "train": {"samples": 1000, "global_batch_size": 8},
}


def test_what_the_loader_completes_is_valid(validator):
    assert not list(validator.iter_errors({**load("demo").dump(), **SHORT}))


WRONG = [
    ("train", "stesp", 3),
    ("train", "steps", 0),
    ("train", "steps", "many"),
    ("model", "dtype", "fp16"),
    ("optimizer", "lr", 0),
    ("optimizer", "betas", [0.9]),
    ("data", "validation", 1),
    ("data", "path", 3),
    ("data", "tokenizer", "words"),
    ("devices", "per_node", 1025),
    ("checkpoint", "async_", True),
    ("parallel", "tp", None),
]


@pytest.mark.parametrize(("section", "key", "value"), WRONG)
def test_a_wrong_key_or_value_is_named_where_it_stands(validator, section, key, value):
    values = load("demo").dump()
    values[section] = {**values[section], key: value}
    (error,) = validator.iter_errors(values)
    assert [*error.absolute_path][:1] == [section] and key in str(error.message) + str(error.absolute_path)


def test_every_key_has_a_description_that_an_editor_can_show(validator):
    sections = [validator.schema, *validator.schema["$defs"].values()]
    named = [key for section in sections for key in section["properties"].values()]
    assert all(key.get("description") or "$ref" in key for key in named)
    assert len(named) == len(list(Recipe.list_key_paths()))
