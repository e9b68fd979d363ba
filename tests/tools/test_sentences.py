"""`python -m tools.sentences`: a sentence of a page that is too long fails, with its place."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.sentences import MOST_WORDS, find_long_sentences, iterate_sentences

LONG = " ".join(["word"] * (MOST_WORDS + 1))
PAGE = f"""# A heading that is {LONG}

One two three. Four five: six
seven (eight.) Nine

- first item
- the second
  on. End
1. third

| {LONG} |
```console
$ {LONG}
```
    {LONG}
last
"""


def test_sentences_end_at_points_colons_items_and_blank_lines():
    assert [(line, " ".join(words)) for line, words in iterate_sentences(PAGE)] == [
        (3, "One two three."),
        (3, "Four five:"),
        (3, "six seven (eight.)"),
        (4, "Nine"),
        (6, "- first item"),
        (7, "- the second on."),
        (8, "End"),
        (9, "1."),
        (9, "third"),
        (16, "last"),
    ]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "docs" / "decisions").mkdir(parents=True)
    for name in ("README.md", "CONTRIBUTING.md", "docs/a.md", "docs/decisions/b.md"):
        (tmp_path / name).write_text(PAGE)
    return tmp_path


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/a.md", "docs/decisions/b.md"])
def test_a_long_sentence_of_any_page_is_named(root, name):
    assert list(find_long_sentences(root)) == []
    (root / name).write_text(f"Short.\n{LONG} and\nmore.\n")
    (message,) = find_long_sentences(root)
    assert message.startswith(f"{name}:2: {MOST_WORDS + 3} ")


@pytest.mark.processes
def test_the_command_fails(root):
    command = [sys.executable, "-m", "tools.sentences", f"--root={root}"]
    assert subprocess.run(command, timeout=60, cwd=Path(__file__).parents[2]).returncode == 0
    (root / "README.md").write_text(LONG)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert done.returncode == 1 and "README.md:1" in done.stderr
