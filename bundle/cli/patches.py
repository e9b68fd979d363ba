"""`mcore-bundle patches`: the patches that this megatron-core needs, with the reasons."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bundle import files
from bundle.cli import options
from bundle.environment import BACKENDS, interpreters, packages
from bundle.environment.packages import InstalledPackages
from bundle.errors import ExitCode
from bundle.patches import Decision, PatchAction, hook
from bundle.patches.entry import NO_CALLER_ASSUMPTION, parse_features, parse_job_features_or_all
from bundle.patches.hook import HookArguments
from bundle.patches.megatron_core import (
    find_installed_or_default_core,
    load_review_table,
    resolve_core_path_or_version,
)
from bundle.patches.plan import Survey, survey_patches

app = typer.Typer(
    rich_markup_mode=None, add_completion=False, no_args_is_help=True, help="Decide, prove and audit patches."
)


@app.command()
def plan(
    mcore: options.Mcore = "",
    backend: Annotated[
        str,
        typer.Option(
            callback=options.allow_only(BACKENDS), help=f"One of {', '.join(BACKENDS)}. Default: all of them."
        ),
    ] = "",
    recipe: Annotated[
        str, typer.Option(help="Decide for this recipe. Default: every feature counts as used.")
    ] = "",
    request: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Apply an opt-in patch, or fail.")
    ] = None,
    allow_drift: options.AllowDrift = None,
    as_json: options.JSON_OPTION = False,
    log_level: options.LogLevel = "",
) -> None:
    """Decide about every patch; ends with 4 if the job needs one that cannot be applied."""
    features, backend = _read_recipe_features_and_backend(recipe, backend)
    installed_packages, table = packages.detect(), load_review_table()
    patch_survey = survey_patches(
        resolve_core_path_or_version(mcore, table)
        if mcore
        else find_installed_or_default_core(installed_packages, table),
        table,
        installed_packages,
        backend=backend or None,
        features=features,
        requested=request or (),
        allowed=allow_drift or (),
    )
    print(
        json.dumps(_build_document(patch_survey), indent=2)
        if as_json
        else "\n".join(_format_lines(patch_survey))
    )
    patch_survey.raise_for_blocking_decisions()


@app.command()
def audit(
    env: Annotated[
        str,
        typer.Option(metavar="PYTHON", help="Audit this environment: its python (not started) or directory."),
    ] = "",
    mcore: options.Mcore = "",
    features: Annotated[
        str,
        typer.Option(metavar="WORD,...", help="List the features of the jobs: mtp,cp,packed. Default: any."),
    ] = "",
    as_json: options.JSON_OPTION = False,
    log_level: options.LogLevel = "",
) -> None:
    """Name the silent defects of an environment's megatron-core; ends with 4 where one reaches the jobs."""
    from bundle.cli.patches_audit import audit as run

    run(env, mcore, features, as_json=as_json)


@app.command()
def verify(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Prove these. Default: all that apply.")
    ] = None,
    backend: options.MachineBackend = "auto",
    as_json: options.JSON_OPTION = False,
) -> None:
    """Prove patches in child processes; ends with 4 if one does not do what it is for."""
    from bundle.environment import compatibility, hardware
    from bundle.verification import verify as run
    from bundle.verification.check import Status

    local_hardware = hardware.detect(backend)
    device = local_hardware.devices[0].name if local_hardware.devices else local_hardware.backend
    labels = {
        status: f"{status} on {device}" if status is Status.PROVEN else str(status) for status in Status
    }
    width = max(map(len, labels.values())) + 2
    results = []
    for result in run(local_hardware.backend, ids or (), devices=len(local_hardware.devices) or None):
        results.append(result)
        if not as_json:
            print(f"{labels[result.status]:<{width}}{result.patch:<42}{result.reason}", flush=True)
    failed = any(result.status is Status.FAILED for result in results)
    if as_json:
        rows = [result.as_json() for result in results]
        proven = ", ".join(result.patch for result in results if result.status is Status.PROVEN)
        extra_fields: dict[str, Any] = {"combination": None}  # for docs/compatibility.md
        if proven and not failed:
            command = " ".join(
                ["mcore-bundle patches verify", *(ids or ()), "--backend", local_hardware.backend]
            )
            combination = compatibility.build_proven_combination(
                packages.detect(), local_hardware.backend, device, [f"patches {proven}"], command
            )
            extra_fields["combination"] = combination.model_dump(mode="json")
        device_fields = {"backend": local_hardware.backend, "device": device}
        print(json.dumps({"schema": 1, **device_fields, "results": rows, **extra_fields}, indent=2))
    if failed:
        raise typer.Exit(int(ExitCode.PATCHES))


@app.command("list")
def list_(as_json: options.JSON_OPTION = False) -> None:
    """List all patches, seams, traps and facades."""
    from bundle.capabilities import ascend, cpu
    from bundle.patches.catalogue import PATCHES, SEAMS, TRAPS

    rows = [("patch", patch.id, patch.range, patch.why, patch.assumes) for patch in PATCHES]
    rows += [("seam", seam.id, seam.range, f"{seam.use}. {seam.why}", "") for seam in SEAMS]
    rows += [("trap", trap.id, trap.range, f"{trap.why} {trap.instead}", "") for trap in TRAPS]
    rows += [
        ("facade", target, "", f"{backend}: {why}", "")
        for backend, facade in (
            ("cpu", cpu.REPLACEMENT_REASON_BY_TORCH_NAME),
            ("ascend", ascend.REPLACEMENT_REASON_BY_TORCH_NAME),
        )
        for target, why in facade.items()
    ]
    if as_json:
        keys = ("kind", "id", "range", "why", "assumes")
        print(
            json.dumps(
                {"schema": 1, "entries": [dict(zip(keys, row, strict=True)) for row in rows]}, indent=2
            )
        )
    else:
        print(
            "\n".join(
                f"{kind:<7}{name:<42}{within or 'every release':<22}{why}{_format_assumption_suffix(assumes)}"
                for kind, name, within, why, assumes in rows
            )
        )


@app.command()
def new(
    patch_id: Annotated[str, typer.Argument(metavar="ID", help="Words with dashes, like mtp-zero-layers.")],
) -> None:
    """Write the files that a new patch starts from, in a checkout of this project."""
    from bundle.patches.scaffold import create_bundle_patch_files

    print(create_bundle_patch_files(patch_id, Path.cwd()))


def _read_recipe_features_and_backend(recipe: str, backend: str) -> tuple[frozenset[str] | None, str]:
    """Return (features, backend) of a recipe; a backend on the command line wins."""
    if not recipe:
        return None, backend
    from bundle.recipe import load as load_recipe

    loaded = load_recipe(recipe)
    return loaded.features, backend or (loaded.backend if loaded.backend in BACKENDS else "")


def _build_document(patch_survey: Survey) -> dict[str, Any]:
    return {
        "schema": 1,
        "mcore": patch_survey.core.as_json(),
        "decisions": [_build_row(decision) for decision in patch_survey.decisions],
    }


def _build_row(decision: Decision) -> dict[str, Any]:
    return {
        "id": decision.id,
        "decision": decision.action.value,
        "reason": decision.reason,
        "range": decision.range,
        "evidence": decision.presence.value,
        "proven": decision.proven,
        "assumes": decision.assumes,
        "target": ", ".join(decision.targets),
        "fingerprint": ", ".join(decision.fingerprints),
    }


def _format_lines(patch_survey: Survey) -> list[str]:
    lines = [str(patch_survey.core)]
    for decision in patch_survey.decisions:
        unproven = "" if decision.proven else " [unproven]"
        assumption = (
            _format_assumption_suffix(decision.assumes) if decision.action is PatchAction.APPLY else ""
        )
        lines.append(f"{decision.action:<9}{decision.id:<42}{decision.reason}{unproven}{assumption}")
    return lines


def _format_assumption_suffix(assumption: str) -> str:
    """Return the end of a line about a patch: what the patch assumes of its caller, if anything."""
    return "" if assumption in ("", NO_CALLER_ASSUMPTION) else f" (assumes that {assumption})"


Environment = Annotated[
    str,
    typer.Option(
        metavar="PYTHON",
        help="Change this environment: its python (started) or directory. Default: this command's.",
    ),
]


@app.command()
def enable(
    env: Environment = "",
    features: Annotated[
        str, typer.Option(metavar="WORD,...", help="List the features of its programs: mtp,cp. Default: any.")
    ] = "",
    vouch: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Confirm that programs meet what this patch assumes."),
    ] = None,
    allow_drift: options.AllowDrift = None,
    backend: options.MachineBackend = "auto",
) -> None:
    """Patch every program of an environment when it imports megatron.core."""
    from bundle.patches import external_program

    arguments = HookArguments(
        parse_features(features.split(",")), tuple(vouch or ()), tuple(allow_drift or ()), backend
    )
    sites = interpreters.query_sites(env or sys.executable)
    stack = InstalledPackages(interpreters.reconstruct_search_path(sites.python))
    messages = ["there is no megatron-core here yet: programs that bring one are patched"]
    if stack.megatron.core is not None:
        patch_survey, _ = external_program.plan_patches(
            stack, arguments.features, vouched=arguments.vouched, allowed=arguments.allowed, backend=backend
        )
        used_features = parse_job_features_or_all(arguments.features)
        messages = [
            *external_program.format_plan_lines(patch_survey),
            *external_program.list_unfixed_defect_warnings(patch_survey, used_features),
        ]
    written = hook.install(sites, arguments)
    print(
        f"{'written' if written else 'there already'}: {files.to_printable(sites.purelib / hook.FILE_NAME)}"
    )
    print("\n".join(messages))


@app.command()
def disable(env: Environment = "") -> None:
    """Remove what `enable` wrote into an environment."""
    sites = interpreters.query_sites(env or sys.executable)
    is_removed = hook.remove(sites)
    print(f"{'removed' if is_removed else 'not there'}: {files.to_printable(sites.purelib / hook.FILE_NAME)}")
