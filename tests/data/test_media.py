"""Where rows name images and videos, and that each has a place: none is left out, none is only text."""

import json

import pytest

from bundle.data.conversations import list_readable_columns, read_conversation
from bundle.data.media import IMAGE, MEDIA_KEYS_BY_KIND, VIDEO, read_content
from bundle.data.preferences import read_preference
from bundle.data.sources import CorruptData
from bundle.recipe.data import Data


def data(**fields) -> Data:
    rows = {"source": "jsonl", "path": ["rows.jsonl"], "sequence_length": 64}
    return Data.model_validate({**rows, "fields": fields})


def llava(question, **row):
    said = [{"from": "human", "value": question}, {"from": "gpt", "value": "a cat"}]
    return {"id": "000000033471", "conversations": said, **row}


def named(row, **fields):
    return [(medium.kind, medium.reference) for medium in read_conversation(row, data(**fields)).media]


@pytest.mark.parametrize(
    ("kind", "key"), [(kind, key) for kind in MEDIA_KEYS_BY_KIND for key in MEDIA_KEYS_BY_KIND[kind]]
)
@pytest.mark.parametrize("listed", [True, False])
def test_common_keys_are_found(kind, key, listed):
    row = llava(f"<{kind}>\nwhat?", **{key: ["a"] if listed else "a"})
    assert key in list_readable_columns(data().fields), "a parquet file is read for this column"
    assert named(row) == [(kind, "a")]
    assert read_conversation(row, data()).messages[0]["content"] == [
        {"type": kind},
        {"type": "text", "text": "\nwhat?"},
    ]


def test_several_images_are_taken_in_their_order():
    assert named(llava("<image> or <image>?", image=["a", "b"])) == [(IMAGE, "a"), (IMAGE, "b")]
    both = llava("<video><image>", image="a", video="b")
    assert named(both) == [(VIDEO, "b"), (IMAGE, "a")]


def test_a_name_in_the_recipe_is_the_only_one_that_is_read(messages):
    row = llava("<image>?", pics="a", image="b", images=["c"])
    assert named(row, images="pics") == [(IMAGE, "a")]
    assert "image" not in list_readable_columns(data(images="pics").fields)
    with pytest.raises(CorruptData, match=r"^pics: .* 0 .* 1 ") as error:
        read_conversation(llava("<image>?", image="b"), data(images="pics"))
    messages(error.value)


def test_two_keys_that_name_different_images_are_refused(messages):
    assert named(llava("<image>", image="a", image_path=["a"])) == [(IMAGE, "a")]
    with pytest.raises(CorruptData, match="image_path") as error:
        read_conversation(llava("<image>", image="a", image_path="b"), data())
    messages(error.value)


NONE: list[dict] = [{}, {"images": []}, {"images": None}, {"image": ""}, {"image": None, "images": []}]


@pytest.mark.parametrize("kind", MEDIA_KEYS_BY_KIND)
@pytest.mark.parametrize("row", NONE)
def test_a_mark_without_an_image_is_an_error_of_the_row(kind, row, messages):
    with pytest.raises(CorruptData, match=rf"{kind}_path.*: .* 0 .* 1 ") as error:
        read_conversation(llava(f"<{kind}>?", **row), data())
    assert f"data.fields.{kind}s: null" in str(error.value)
    messages(error.value)
    assert named(llava(f"<{kind}>?", **row), **{f"{kind}s": None}) == [], "null: the mark is plain text"
    assert named(llava("?", **row)) == []


@pytest.mark.parametrize("kind", MEDIA_KEYS_BY_KIND)
@pytest.mark.parametrize(("marks", "media"), [(0, 1), (1, 2), (2, 1)])
def test_as_many_images_as_places(kind, marks, media, messages):
    row = llava(f"<{kind}>" * marks + "?", **{kind: ["a"] * media})
    with pytest.raises(CorruptData, match=rf"^{kind}: .* {media} .* {marks} ") as error:
        read_conversation(row, data())
    messages(error.value)


def test_marks_in_parts_are_places_and_those_of_answers_are_not():
    parts = [{"type": "image", "image": "a"}, {"type": "text", "text": "or <image>?"}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "<image>"}]}
    assert named({**row, "images": ["b"]}) == [(IMAGE, "a"), (IMAGE, "b")]
    with pytest.raises(CorruptData, match=r" 0 .* 1 "):
        read_conversation(row, data())
    with pytest.raises(CorruptData, match=r" 2 .* 1 "):
        read_conversation({**row, "images": ["b", "c"]}, data())


def test_images_of_a_message_are_refused():
    said = [{"role": "user", "content": "?", "images": ["a"]}, {"role": "assistant", "content": "."}]
    with pytest.raises(CorruptData, match=r"^message 0: images"):
        read_conversation({"messages": said}, data())


def test_both_answers_of_a_preference_have_the_images_of_their_prompt():
    asked = [{"role": "user", "content": [{"type": "image", "image": "a"}, {"type": "text", "text": "?"}]}]
    row = {"prompt": asked, "chosen": "yes", "rejected": "no"}
    before = json.dumps(row)
    for each in read_preference(row, data()):
        assert [(medium.kind, medium.reference) for medium in each.media] == [(IMAGE, "a")]
    assert json.dumps(row) == before


def test_a_file_url_is_a_path_below_the_rows(tmp_path, messages):
    folder, path = tmp_path / "rows", tmp_path / "rows" / "images" / "a 1.png"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"pixels")
    (tmp_path / "outside.png").write_bytes(b"theirs")
    whole = str(path).replace(" ", "%20")
    for name in (str(path), f"file://{whole}", f"FILE://localhost{whole}", "file://images/a%201.png"):
        assert read_content(name, folder, 100, IMAGE) == b"pixels", name
    for name in (f"file://{tmp_path}/outside.png", "file://../outside.png", "file:///etc/passwd"):
        with pytest.raises(CorruptData, match="outside") as error:
            read_content(name, folder, 100, IMAGE)
    messages(error.value)
    with pytest.raises(CorruptData, match="is a URL"):
        read_content("https://localhost/a.png", folder, 100, IMAGE)
