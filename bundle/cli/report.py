"""`mcore-bundle report`: one page about a run, or about several side by side."""

from pathlib import Path
from typing import Annotated

import typer

from bundle.report import read_run, write_page

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories of runs.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the page here, and plotly.min.js beside it. Default: report.html in the first run.",
        ),
    ] = None,
) -> None:
    """Write one page with the curves, the plan, the patches and the versions; it needs no network."""
    page = output or runs[0] / "report.html"
    write_page(page, [read_run(run) for run in runs])
    print(page)
