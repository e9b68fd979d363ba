"""`mcore-bundle doctor`: can this machine run a job, and if not, why and what to do."""

import json

import typer

from bundle.cli import options
from bundle.environment import image, interpreters, machine, packages
from bundle.environment.doctor import examine
from bundle.environment.machine import Finding, Level
from bundle.errors import ExitCode
from bundle.patches import hook

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def doctor(
    backend: options.OwnBackend = "auto",
    as_json: options.JSON = False,
    log_level: options.LogLevel = "",
) -> None:
    """Examine the machine and the installed packages; ends with 3 if something must be fixed first."""
    installed = packages.detect()
    found, findings = examine(machine.local(), installed, backend)
    findings = (*findings, *hook.findings(hook.found(interpreters.own_sites())))
    if as_json:
        built = image.own()
        report = {
            "schema": 1,
            "findings": machine.plain(findings),
            "hardware": machine.plain(found),
            "image": built.model_dump(by_alias=True) if built else None,  # for `plan --image-record`
        }
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(map(_line, findings)))
    if any(finding.level is Level.FAIL for finding in findings):
        raise typer.Exit(int(ExitCode.ENVIRONMENT_UNFIT))


def _line(finding: Finding) -> str:
    fix = f"\n{'':22}fix: {finding.fix}" if finding.fix else ""
    return f"{finding.level:<5} {finding.subject:<15} {finding.cause}{fix}"
