"""The words for what a job uses."""

from pathlib import Path

import pytest

from bundle.errors import UsageError
from bundle.patches.catalogue import PATCHES, TRAPS
from bundle.patches.entry import (
    FEATURES,
    UNIVERSAL_FEATURES,
    add_universal_features,
    format_non_implicit_features,
)


def test_the_words_are_those_that_the_list_asks_for():
    asked = {word for patch in PATCHES for word in patch.when} | {
        word for trap in TRAPS for word in trap.when
    }
    asked |= {word for trap in TRAPS for word in trap.unless}
    assert set(FEATURES) == asked
    assert set(FEATURES) >= UNIVERSAL_FEATURES and list(FEATURES) == sorted(FEATURES)


def test_the_page_explains_every_word():
    page = (Path(__file__).parents[2] / "docs/audit.md").read_text("utf-8")
    assert [f"| `{word}` | {meaning} |" in page for word, meaning in FEATURES.items()] == [True] * len(
        FEATURES
    )
    assert ", ".join(f"`{word}`" for word in sorted(UNIVERSAL_FEATURES)) in page


def test_a_list_of_words():
    assert add_universal_features(()) is None and add_universal_features((" ", "")) is None
    assert add_universal_features(("mtp", " CP")) == frozenset({"mtp", "cp"}) | UNIVERSAL_FEATURES
    assert format_non_implicit_features({"mtp", "cp", "bf16"}) == "cp and mtp"


def test_every_word_that_is_none_is_said(messages):
    with pytest.raises(UsageError) as error:
        add_universal_features(("packd", "mtp", "x" + "y" * 200))
    misspelled, long = error.value.violations
    assert "packd" in misspelled and "packed" in misspelled and long == "x" + "y" * 99
    messages(error.value)
