"""`mcore-bundle doctor`: a check that this machine can run a job, with the causes and remedies."""

import json
import platform
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bundle.cli import options
from bundle.environment import image, interpreters, machine, packages
from bundle.environment.doctor import examine
from bundle.environment.machine import Finding, Hardware, Level
from bundle.environment.packages import InstalledPackages
from bundle.errors import ExitCode
from bundle.patches import hook

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def doctor(
    acceptance: Annotated[
        bool, typer.Option("--acceptance", help="Also compute, exchange, train and prove here: half an hour.")
    ] = False,
    backend: options.MachineBackend = "auto",
    as_json: options.JSON_OPTION = False,
    log_level: options.LogLevel = "",
) -> None:
    """Examine the machine and the installed packages; ends with 3 if something must be fixed first."""
    installed_packages = packages.detect()
    local_hardware, findings = examine(machine.build_local_machine(), installed_packages, backend)
    findings = (*findings, *hook.list_ok_and_fault_findings(hook.find_hooks(interpreters.list_own_sites())))
    if acceptance and local_hardware is not None:
        _run_acceptance(local_hardware, installed_packages, findings, as_json)
        return
    if as_json:
        image_record = image.read_own_record()
        report = {
            "schema": 1,
            **_describe_node_software(installed_packages),
            "findings": machine.to_json_value(findings),
            "hardware": machine.to_json_value(local_hardware),
            "image": image_record.model_dump(by_alias=True)
            if image_record
            else None,  # for `plan --image-record`
        }
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(map(format_finding, findings)))
    if any(finding.level is Level.FAIL for finding in findings):
        raise typer.Exit(int(ExitCode.ENVIRONMENT_UNFIT))


def _run_acceptance(
    hardware: Hardware, installed_packages: InstalledPackages, findings: Sequence[Finding], as_json: bool
) -> None:
    """Print the result of each part; end with 3 where one failed, and then keep its runs."""
    from bundle.acceptance import build_document, run_acceptance

    runs_directory, parts = Path(tempfile.mkdtemp(prefix="mcore-bundle-acceptance-")), []
    for part in run_acceptance(hardware, findings, runs_directory):
        parts.append(part)
        if not as_json:
            print(format_finding(part.to_finding(runs_directory)), flush=True)
    if as_json:
        print(json.dumps(build_document(hardware, installed_packages, parts), indent=2))
    if any(part.result.wrong for part in parts):
        raise typer.Exit(int(ExitCode.ENVIRONMENT_UNFIT))
    shutil.rmtree(runs_directory)


def _describe_node_software(stack: InstalledPackages) -> dict[str, Any]:
    """Return what a report says besides hardware and findings: everything that jobs depend on."""
    return {
        "node": socket.gethostname(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {
            package.name: f"{package.version}{f' at {package.commit}' if package.commit else ''}"
            for package in stack.list_tracked_packages()
        },
    }


def format_finding(finding: Finding) -> str:
    """Return the text of a finding for people."""
    fix = f"\n{'':22}fix: {finding.fix}" if finding.fix else ""
    return f"{finding.level:<5} {finding.subject:<15} {finding.cause}{fix}"
