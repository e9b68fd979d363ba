"""No key, spelling, value or kind of file gets anything but a Recipe or a UsageError out of the loader."""

import json
import os
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bundle.errors import UsageError
from bundle.recipe import Recipe, from_mapping, load
from tests.architectures.test_hostile import JSON
from tests.command import run_bundle
from tests.recipe.violations import collect_violations

KEYS = sorted(Recipe.list_key_paths())
NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 2**31, 10**30, -0.0, 1e308, float("nan"), float("inf")])


@st.composite
def misspelt(draw):
    """A known key with one letter left out, doubled, or exchanged with its neighbour."""
    name = draw(st.sampled_from(KEYS))
    at = draw(st.integers(0, len(name) - 1))
    swapped = name[:at] + name[at : at + 2][::-1] + name[at + 2 :]
    return draw(st.sampled_from([name[:at] + name[at + 1 :], name[:at] + name[at] + name[at:], swapped]))


def laid_over(values: dict[str, Any], name: str, value: Any) -> None:
    """Puts `value` under the dotted `name`, whatever stands in the way."""
    *path, last = name.split(".")
    for part in path:
        if not isinstance(values.get(part), dict):
            values[part] = {}
        values = values[part]
    values[last] = value


@given(
    st.lists(st.tuples(st.sampled_from(KEYS) | misspelt(), JSON | NUMBERS | st.text(max_size=5)), max_size=4),
    st.sets(st.sampled_from(KEYS), max_size=2),
)
@example([("model", {"paht": "/models/x"})], set())
@example([("model", {"config ": {}, "path": None})], set())
@example([("model.path", "a\0b")], set())
def test_any_keys_and_values_are_read_or_refused(given_values, gone):
    values = load("demo").dump()
    for name, value in given_values:
        laid_over(values, name, value)
    for name in gone:
        laid_over(values, name, None)
    try:
        assert isinstance(from_mapping(values), Recipe)
    except UsageError as error:
        assert error.violations


@pytest.mark.parametrize("typo", ["paht", "config_", "pth"])
def test_a_misspelt_path_of_the_model_is_named_with_what_is_missing(typo, messages):
    unknown, missing = collect_violations("demo", f"model={{{typo}: /models/x}}")
    assert unknown.startswith(f"model.{typo}: ") and missing.startswith("model: ")
    messages(unknown)
    messages(missing)


@pytest.mark.parametrize("suffix", ["yaml", "config"])
def test_a_pipe_is_refused_at_once(tmp_path, suffix):
    pipe = tmp_path / ("r.yaml" if suffix == "yaml" else "config.json")
    os.mkfifo(pipe)
    args = [str(pipe)] if suffix == "yaml" else ["demo", "--set", f"model.path={tmp_path}"]
    ran = run_bundle("plan", *args, code=2, timeout=60)
    assert f"{pipe}: a pipe or a device" in ran.stderr and "Traceback" not in ran.stderr


def test_a_device_is_no_recipe(messages):
    with pytest.raises(UsageError, match="/dev/zero") as error:
        load("/dev/zero")
    messages(error.value)


def test_a_recipe_of_a_megabyte_is_no_recipe(tmp_path, messages):
    (tmp_path / "r.yaml").write_text(json.dumps({"name": "x" * 2**20}))
    with pytest.raises(UsageError, match="1048576 bytes") as error:
        load(tmp_path / "r.yaml")
    messages(error.value)
