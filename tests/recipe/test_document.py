"""YAML that anybody may have written."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle.errors import UsageError
from bundle.recipe.document import parse, parse_value, to_yaml

SCALAR = [
    ("1e-3", 1e-3),
    ("1.0e-3", 1e-3),
    ("010", 10),
    ("1_000", 1000),
    ("1:30", "1:30"),
    ("yes", "yes"),
    ("true", True),
    ("~", None),
    ("", None),
    ("'3'", "3"),
    ("-7", -7),
    ("2024-01-01", "2024-01-01"),
    ("[a, 1]", ["a", 1]),
    ("{layers: 2}", {"layers": 2}),
    (".inf", float("inf")),
    ("x=y:z", "x=y:z"),
    ("=", "="),
]


@pytest.mark.parametrize(("text", "value"), SCALAR)
def test_scalars_are_those_of_yaml_1_2(text, value):
    read = parse_value(text, "--set")
    assert read == value and type(read) is type(value)


def test_places_are_files_and_lines():
    document = parse("a: 1\nb:\n  c:\n    - x\n", "r.yaml")
    assert document.values == {"a": 1, "b": {"c": ["x"]}}
    assert document.find_location(("b", "c")) == "r.yaml:3"
    assert document.find_location(("b", "c", 0)) == "r.yaml:3"
    assert document.find_location(("z",)) == ""


def test_every_duplicate_key_is_named_with_both_lines(messages):
    document = parse("a: 1\nb: {x: 1, x: 2}\na: 2\n", "r.yaml")
    places = [(*line.split(": ")[:2], line.rpartition(" ")[2]) for line in document.violations]
    assert places == [("r.yaml:2", "b.x", "r.yaml:2"), ("r.yaml:3", "a", "r.yaml:1")]
    messages("\n".join(document.violations))
    assert document.values == {"a": 1, "b": {"x": 1}}


LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdef", "bcdefg", strict=True)
)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (LAUGHS, "r.yaml:2: .*aliases"),
        ("a: " + "[" * 500, "nested deeper"),
        ("a: [", "not YAML"),
        ("\tb: 1", "not YAML"),
        ("a: 1\n---\nb: 2", "not YAML"),
        ("a: \x01", "not YAML"),
        ("a: " + "x" * 2**20, "longer than"),
        ("", "mapping"),
        ("- a", "mapping"),
    ],
)
def test_what_is_no_recipe_is_refused_with_its_place(text, named):
    with pytest.raises(UsageError, match=named):
        parse(text, "r.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/object/apply:os.system [ls]",
        "a: !x 1",
        "? [a]\n: 1",
        "a: !!python/name:os.x",
        'a: "\\ud800"',
        "a: !!binary aGk=",
        "a: !!set {x}",
        "a: -_",
        "a: !!bool maybe",
        "a: " + "9" * 5000,
    ],
)
def test_tags_odd_keys_and_odd_numbers_are_violations(text):
    assert parse(text, "r.yaml").violations


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(UsageError):
        parse(text, "r.yaml")


KEYS = st.text(max_size=50)  # YAML's simple keys end at 1024 characters, escapes counted
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_what_json_writes_is_read_back(values):
    assert parse(json.dumps(values), "r.json").values == values


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_what_is_written_is_read_back_in_the_same_order(values):
    read = parse(to_yaml(values), "r.yaml").values
    assert read == values and list(read) == list(values)
