"""The tasks that a recipe names: the rows that each reads, and what belongs to it alone."""

from collections.abc import Mapping
from typing import NamedTuple


class Task(NamedTuple):
    """What a task learns from. `section` is the section of a recipe that no other task has."""

    row_fields: str = ""  # the fields of a row, for people; empty: running text
    section: str = ""
    has_pairs: bool = False  # a row has a chosen and a rejected response
    samples_answers: bool = False  # to the questions in its rows

    @property
    def has_plain_text_rows(self) -> bool:
        """Return whether every token of a text is learned, without a chat template."""
        return not self.row_fields

    @property
    def documents_per_sample(self) -> int:
        """Return the number of token documents that are never apart."""
        return 2 if self.has_pairs else 1


TASKS: Mapping[str, Task] = {
    "pretrain": Task(),
    "sft": Task("a prompt and a response"),
    "dpo": Task("a chosen and a rejected response", section="dpo", has_pairs=True),
    "rl": Task("a prompt", section="rl", samples_answers=True),
}
