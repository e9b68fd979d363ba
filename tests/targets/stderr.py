"""What a command writes to stderr, as it is the same in every run."""

import re


def drop_times(text: str) -> str:
    """Return the lines of the log without when each was written."""
    return re.sub(r"^[-\d]+ [:\d]+ (?=WARNING )", "", text, flags=re.MULTILINE)
