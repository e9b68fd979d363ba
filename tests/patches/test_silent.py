"""Which defects nothing tells of, by the words in which the list describes them."""

import re

import pytest

from bundle.patches.catalogue import PATCHES, TRAPS
from bundle.patches.entry import DefectKind, Patch, Trap

_UNNOTICED = re.compile(
    r"silently|wrong gradient|different copies|too (small|large|weak|little)|wrong direction"
    r"|no error is raised"
)
_SEEN = re.compile(r"\b(fails?|refuses|is refused|a hang|\w+Error|NaN|the host waits)\b")
_BOTH = {
    "mtp-packed-roll-boundaries",
    "mla-uncompressed-query-norm",
}  # by release, by spec


@pytest.mark.parametrize("entry", [*PATCHES, *TRAPS], ids=lambda entry: entry.id)
def test_what_a_user_sees_is_not_silent_and_what_only_the_numbers_show_is(entry: Patch | Trap):
    if _UNNOTICED.search(entry.why):
        assert entry.kind is DefectKind.SILENT
    elif _SEEN.search(entry.why) and entry.id not in _BOTH:
        assert entry.kind is not DefectKind.SILENT
