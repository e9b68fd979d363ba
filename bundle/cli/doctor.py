"""`mcore-bundle doctor`: can this machine run a job, and if not, why and what to do."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from bundle.cli import options
from bundle.environment import image, interpreters, machine, nodes, packages
from bundle.environment.doctor import examine
from bundle.environment.machine import Finding, Hardware, Level
from bundle.environment.packages import Stack
from bundle.errors import ExitCode, UsageError
from bundle.patches import hook

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def doctor(
    context: typer.Context,
    reports: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[REPORT]...", help="Of --compare: what `doctor --json` printed on each node."
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Say in what nodes differ, instead of examining this one.")
    ] = False,
    acceptance: Annotated[
        bool,
        typer.Option("--acceptance", help="Then compute, exchange, train and prove here, half an hour."),
    ] = False,
    backend: options.OwnBackend = "auto",
    as_json: options.JSON = False,
    log_level: options.LogLevel = "",
) -> None:
    """Examine the machine and the installed packages; ends with 3 if something must be fixed first."""
    if compare is not bool(reports):
        raise UsageError("reports of nodes and --compare go together: doctor --compare A.json B.json ...")
    if reports and (more := options.said(context) & {"backend", "acceptance"}):
        named = " and ".join(f"--{name}" for name in sorted(more))
        raise UsageError(f"--compare looks at files, not at this machine: leave out {named}")
    if reports:
        _compare(reports, as_json)
        return
    installed = packages.detect()
    found, findings = examine(machine.local(), installed, backend)
    findings = (*findings, *hook.findings(hook.found(interpreters.own_sites())))
    if acceptance and found is not None:
        _accept(found, installed, findings, as_json)
        return
    if as_json:
        built = image.own()
        report = {
            "schema": 1,
            **nodes.described(installed),
            "findings": machine.plain(findings),
            "hardware": machine.plain(found),
            "image": built.model_dump(by_alias=True) if built else None,  # for `plan --image-record`
        }
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(map(line, findings)))
    if any(finding.level is Level.FAIL for finding in findings):
        raise typer.Exit(int(ExitCode.ENVIRONMENT_UNFIT))


def _accept(hardware: Hardware, installed: Stack, findings: Sequence[Finding], as_json: bool) -> None:
    """Prints what each part came to; ends with 3 where one failed, whose runs it leaves behind."""
    from bundle.verification.acceptance import accept, document

    runs, parts = Path(tempfile.mkdtemp(prefix="mcore-bundle-acceptance-")), []
    for part in accept(hardware, findings, runs):
        parts.append(part)
        if not as_json:
            print(line(part.finding(runs)), flush=True)
    if as_json:
        print(json.dumps(document(hardware, installed, parts), indent=2))
    if any(part.found.wrong for part in parts):
        raise typer.Exit(int(ExitCode.ENVIRONMENT_UNFIT))
    shutil.rmtree(runs)


def _compare(paths: Sequence[Path], as_json: bool) -> None:
    """Prints in what nodes differ; ends with 3 where they do."""
    reports = nodes.read(paths)
    found = nodes.differences(reports)
    if as_json:
        print(
            json.dumps(
                {"schema": 1, "nodes": list(reports), "differences": [one.dump() for one in found]}, indent=2
            )
        )
    else:
        print("\n".join(one.text() for one in found) or f"{len(reports)} nodes are alike")
    if found:
        raise typer.Exit(int(ExitCode.ENVIRONMENT_UNFIT))


def line(finding: Finding) -> str:
    """A finding as people read it."""
    fix = f"\n{'':22}fix: {finding.fix}" if finding.fix else ""
    return f"{finding.level:<5} {finding.subject:<15} {finding.cause}{fix}"
