"""The command line in this process: what a verb prints and its exit code, without a second interpreter."""

import io
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout

from bundle.cli import app
from bundle.errors import BundleError


def run_command(words: Sequence[str]) -> tuple[int, str]:
    """The exit code and all that is printed, as `main` ends; any other exception is the test's."""
    written = io.BytesIO()
    with io.TextIOWrapper(written, "utf-8", "backslashreplace", write_through=True) as stream:
        with redirect_stdout(stream), redirect_stderr(stream):
            code = _code_of(words)
        return code, written.getvalue().decode()


def _code_of(words: Sequence[str]) -> int:
    try:
        app(list(words), prog_name="mcore-bundle")
    except BundleError as error:
        print(f"mcore-bundle: {error}")
        return int(error.code)
    except SystemExit as end:
        return int(end.code or 0)
    return 0
