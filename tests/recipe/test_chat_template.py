"""A chat template of a recipe: a file or a built-in name, whose text takes its place in what is launched."""

import json

import pytest

from bundle.errors import UsageError
from bundle.recipe import from_mapping, list_differences, load
from bundle.recipe.chat_template import MOST_BYTES, list_built_in
from bundle.recipe.completion import list_shown_settings
from tests.data import chat

ROWS = ["task=sft", "data.source=jsonl", "data.path=[rows.jsonl]", "data.separator=null"]
ROWS += ["data.tokenizer=hf:none"]


def recipe(*overrides):
    return load("demo", [*ROWS, *overrides])


def refused(*overrides) -> tuple[str, ...]:
    with pytest.raises(UsageError) as caught:
        recipe(*overrides)
    assert caught.value.code == 2
    return caught.value.violations


def test_the_text_of_a_file_is_in_the_recipe_and_needs_the_file_no_more(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text(chat.SIMPLE)
    found = recipe(f"data.template={path}")
    assert found.data.template == found.data.custom_template_text == chat.SIMPLE
    assert found.data.has_template and str(path) in found.origins["data.template"]
    path.unlink()
    again = from_mapping(json.loads(json.dumps(found.dump())))
    assert again == found and not list_differences(found, again)


def test_another_text_under_the_same_name_is_another_job(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text(f"{chat.SIMPLE}\n{'x' * 10**4}")
    first = recipe(f"data.template={path}")
    path.write_text(f"{chat.SIMPLE}\n")
    (change,) = list_differences(first, recipe(f"data.template={path}"))
    assert change.key == "data.template" and not change.is_free_on_resume
    assert len(str(change)) < 200


def test_a_recipe_may_have_the_text_itself_and_plans_do_not_print_it():
    found = recipe(f"data.template={json.dumps(chat.SIMPLE)}")
    assert found.data.custom_template_text == chat.SIMPLE
    (said,) = (
        each for each in list_shown_settings(found.dump(), found.origins) if each.key == "data.template"
    )
    assert "{%" not in said.value and str(len(chat.SIMPLE)) in said.value


@pytest.mark.parametrize(("value", "text"), [("plain", None), ("chat", None)])
def test_plain_and_chat_are_no_texts(value, text):
    assert recipe(f"data.template={value}").data.custom_template_text is text


def test_built_in_templates_are_found_by_name():
    assert "chatml" in list_built_in()
    for name in list_built_in():
        assert "messages" in (recipe(f"data.template={name}").data.custom_template_text or "")


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        (None, "No such file"),
        (b"\xff{{ messages }}", "UTF-8"),
        (b"{{ message }}", "messages"),
        (b"", "messages"),
        (b"{{ messages }}" + b" " * MOST_BYTES, "bytes"),
    ],
)
def test_a_file_without_a_template_is_refused_by_key_file_and_place(tmp_path, content, seen):
    path = tmp_path / "mine.jinja"
    if content is not None:
        path.write_bytes(content)
    (violation,) = refused(f"data.template={path}")
    assert violation.startswith("--set data.template=") and f"data.template: {path}: " in violation
    assert seen in violation


@pytest.mark.parametrize("name", ["chatmll", "mine.txt", "mine", "/dev/null"])
def test_what_is_neither_a_name_nor_a_file_is_refused(name):
    (violation,) = refused(f"data.template={name}")
    assert f"data.template: {name} " in violation and "chatml" in violation


def test_a_directory_and_other_types_are_refused(tmp_path):
    (tmp_path / "d.jinja").mkdir()
    assert len(refused(f"data.template={tmp_path / 'd.jinja'}")) == 1
    for value in ("[chat]", "3", "{a: 1}", "null", '""'):
        assert all("data.template" in each for each in refused(f"data.template={value}")), value


def test_a_text_without_the_conversation_and_one_for_bytes_are_refused():
    assert all("data.template:" in each for each in refused('data.template="{{ message }}"'))
    assert any("data.template:" in each for each in refused("data.template=chatml", "data.tokenizer=bytes"))
