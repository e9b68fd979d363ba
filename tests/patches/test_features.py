"""The words for what a job uses."""

from pathlib import Path

import pytest

from bundle.errors import UsageError
from bundle.patches.catalogue import PATCHES, TRAPS
from bundle.patches.entry import (
    FEATURES,
    IMPLICIT_EXTERNAL_FEATURES,
    format_non_implicit_features,
    parse_job_features_or_all,
)


def test_the_words_are_those_that_the_list_asks_for():
    asked = {word for patch in PATCHES for word in patch.when} | {
        word for trap in TRAPS for word in trap.when
    }
    asked |= {word for trap in TRAPS for word in trap.unless}
    assert set(FEATURES) == asked
    assert set(FEATURES) >= IMPLICIT_EXTERNAL_FEATURES and list(FEATURES) == sorted(FEATURES)


def test_the_page_explains_every_word():
    page = (Path(__file__).parents[2] / "docs/audit.md").read_text("utf-8")
    assert [f"| `{word}` | {meaning} |" in page for word, meaning in FEATURES.items()] == [True] * len(
        FEATURES
    )
    assert ", ".join(f"`{word}`" for word in sorted(IMPLICIT_EXTERNAL_FEATURES)) in page


def test_a_list_of_words():
    assert parse_job_features_or_all(()) is None and parse_job_features_or_all((" ", "")) is None
    assert parse_job_features_or_all(("mtp", " CP")) == frozenset({"mtp", "cp"}) | IMPLICIT_EXTERNAL_FEATURES
    assert format_non_implicit_features({"mtp", "cp", "bf16"}) == "cp and mtp"


def test_every_word_that_is_none_is_said(messages):
    with pytest.raises(UsageError) as error:
        parse_job_features_or_all(("packd", "mtp", "x" + "y" * 200))
    misspelled, long = error.value.violations
    assert "packd" in misspelled and "packed" in misspelled and long == "x" + "y" * 99
    messages(error.value)
