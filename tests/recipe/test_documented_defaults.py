"""The tables of defaults in the documentation have the values of the code."""

import re
from pathlib import Path

import pytest

from bundle.recipe import defaults

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "kinds"),
    [
        ("chats.md", (defaults.SFT, defaults.LORA_SFT)),
        ("preferences.md", (defaults.DPO, defaults.LORA_DPO)),
        ("reinforcement-learning.md", (defaults.RL, defaults.LORA_RL)),
    ],
)
def test_a_page_has_the_defaults_of_its_task(page, kinds):
    _, _, section = (DOCS / page).read_text().partition("## What may be left out\n")
    rows = re.findall(
        r"^\| `([^`]+)` \| `([^`]+)`(.*)\| (?:`([^`]+)`|the same) \|$", section.partition("\n## ")[0], re.M
    )
    cells = {key: (full, more, lora) for key, full, more, lora in rows}
    for column, kind in enumerate(kinds):
        table = {each.key: each for each in defaults.DEFAULTS_BY_TRAINING_KIND[kind]}
        documented = cells.keys() & table.keys()
        assert len(documented) == 8
        for key in documented:
            value = table[key].value
            text = str(value).lower() if isinstance(value, bool) else str(value)
            assert cells[key][2 * column] == text, (kind, key)
            for _, larger in table[key].by_size:
                assert str(larger) in cells[key][1]
