"""`mcore-bundle launch list`: the jobs of all targets."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, NamedTuple

import typer

from bundle import files
from bundle.cli import options
from bundle.cli.launch.submission import TARGETS_WITH_JOB_ID_PATTERNS
from bundle.errors import TargetUnavailable
from bundle.targets.states import ListedJob, TargetNotConfigured

_log = logging.getLogger(__name__)


class _Answer(NamedTuple):
    """The jobs of a target, or the reason why it did not list them; neither where it is not configured."""

    target: str
    jobs: list[ListedJob] | None
    reason: str = ""


def list_(
    include_ended: Annotated[
        bool, typer.Option("--all", "-a", help="Also list the ended jobs that a target still knows.")
    ] = False,
    as_json: options.JSON_OPTION = False,
) -> None:
    """List your jobs on every target that this machine can reach, with state and run directory."""
    with ThreadPoolExecutor() as executor:  # a cluster that is away takes a minute
        answers = list(executor.map(_query_target, TARGETS_WITH_JOB_ID_PATTERNS))
    unreachable = {answer.target: answer.reason for answer in answers if answer.reason}
    for target, reason in unreachable.items():
        _log.warning("%s: its jobs are not listed: %s", target, reason)
    rows = [
        {
            "handle": f"{answer.target}:{job.name}",
            "target": answer.target,
            "state": job.state,
            "run_directory": str(job.directory),
        }
        for answer in answers
        for job in answer.jobs or ()
        if include_ended or not job.has_ended
    ]
    if as_json:
        print(json.dumps({"schema": 1, "jobs": rows, "unreachable": unreachable}, indent=2))
        return
    columns = ("handle", "state", "run_directory")
    table = [[files.to_printable(row[column]) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(f"{text:<{width}}" for text, width in zip(line, widths, strict=True)).rstrip())
    if not rows:
        print(f"no jobs on {', '.join(answer.target for answer in answers if answer.jobs is not None)}")


def _query_target(name: str) -> _Answer:
    target, _ = TARGETS_WITH_JOB_ID_PATTERNS[name]
    try:
        return _Answer(name, list(target.list_jobs()))
    except TargetNotConfigured:
        return _Answer(name, None)
    except TargetUnavailable as error:
        return _Answer(name, None, str(error))
