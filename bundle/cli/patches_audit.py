"""`mcore-bundle patches audit`: the silent defects of a user's environment, and their remedies."""

import json
from collections.abc import Iterable
from typing import Any

import typer

from bundle import files
from bundle.environment import interpreters, packages
from bundle.environment.packages import InstalledPackages, Package
from bundle.errors import EnvironmentUnfit, ExitCode
from bundle.patches import hook
from bundle.patches.audit import Audit, AuditedDefect, DefectStatus
from bundle.patches.audit import audit as examine
from bundle.patches.entry import (
    NO_CALLER_ASSUMPTION,
    DefectKind,
    Patch,
    format_non_implicit_features,
    parse_job_features_or_all,
)
from bundle.patches.hook import Hook, HookArguments
from bundle.patches.megatron_core import (
    MegatronCore,
    ReviewTable,
    find_installed_or_default_core,
    load_review_table,
    resolve_core_path_or_version,
)

_INDENT = " " * 13


def audit(env: str, mcore: str, features: str, *, as_json: bool) -> None:
    """Print the silent defects; end with 4 where one reaches the jobs."""
    used_features, table = parse_job_features_or_all(features.split(",")), load_review_table()
    stack = InstalledPackages(interpreters.reconstruct_search_path(env)) if env else packages.detect()
    if (
        not env
        and not mcore
        and stack.megatron.core is None
        and (active := interpreters.find_other_environment())
    ):
        stack = InstalledPackages(interpreters.reconstruct_search_path(env := active))
    audit_report = examine(_find_megatron_core(mcore, stack, table, env), table, stack, used_features)
    hooks = hook.find_hooks(interpreters.find_sites(env) if env else interpreters.list_own_sites())
    document = {
        **_build_document(audit_report, env, used_features),
        "hooks": [_build_hook_row(installed_hook) for installed_hook in hooks],
    }
    print(
        json.dumps(document, indent=2)
        if as_json
        else "\n".join(_format_lines(audit_report, used_features, hooks))
    )
    if audit_report.present_silent_defects:
        raise typer.Exit(int(ExitCode.PATCHES))


def _find_megatron_core(mcore: str, stack: InstalledPackages, table: ReviewTable, env: str) -> MegatronCore:
    if mcore:
        return resolve_core_path_or_version(mcore, table)
    if stack.megatron.core is None:
        archive = stack.megatron.archive
        reason = f"megatron-core is in a zip ({archive})" if archive else "megatron-core is not installed"
        raise EnvironmentUnfit(
            f"{files.to_printable(env or 'this environment')}: {reason}. Name another environment with"
            " --env PYTHON, or a source tree with --mcore PATH"
        )
    return find_installed_or_default_core(stack, table)


def _build_document(audit_report: Audit, env: str, used_features: frozenset[str] | None) -> dict[str, Any]:
    return {
        "schema": 2,
        "environment": env or None,
        "mcore": audit_report.core.as_json(),
        "frameworks": [
            {"name": p.name, "version": p.version, "commit": p.commit, "path": str(p.path)}
            for p in audit_report.frameworks
        ],
        "features": None if used_features is None else sorted(used_features),
        "reaching": [defect.entry.id for defect in audit_report.present_silent_defects],
        "defects": [_build_row(defect) for defect in audit_report.defects],
        "upgrades": [
            {"release": upgrade.release, "left": upgrade.remaining_ids, "new": upgrade.new_ids}
            for upgrade in audit_report.upgrades
        ],
    }


def _build_hook_row(installed_hook: Hook) -> dict[str, Any]:
    arguments = (
        installed_hook.arguments._asdict()
        if installed_hook.arguments
        else dict.fromkeys(HookArguments._fields)
    )
    return {"file": str(installed_hook.file), **arguments, "fault": installed_hook.fault or None}


def _build_row(defect: AuditedDefect) -> dict[str, Any]:
    entry = defect.entry
    is_patch = isinstance(entry, Patch)
    return {
        "id": entry.id,
        "standing": defect.status.value,
        "kind": entry.kind.value,
        "proven": defect.proven,
        "reason": defect.reason,
        "features": sorted(entry.when),
        "unless": [] if isinstance(entry, Patch) else sorted(entry.unless),
        "why": entry.why,
        "replaced_by": [
            {"framework": p.framework, "target": p.target, "place": p.location, "when": p.when}
            for p in defect.patched_by
        ],
        "mended_in": defect.fixing_minor,
        "instead": None if isinstance(entry, Patch) else entry.instead,
        "patch": is_patch and defect.has_patch,
        "assumes": entry.assumes if isinstance(entry, Patch) else "",
    }


def _format_lines(
    audit_report: Audit, used_features: frozenset[str] | None, hooks: Iterable[Hook]
) -> list[str]:
    lines = [str(audit_report.core), *map(_format_framework, audit_report.frameworks)]
    for finding in hook.list_ok_and_fault_findings(hooks):
        remedy = finding.fix or "the results below hold without them"
        lines.append(f"{finding.subject}: {finding.cause}; {remedy}")
    silent, errors, slow = ([d for d in audit_report.defects if d.entry.kind is kind] for kind in DefectKind)
    counts = [
        f"{count} {label}"
        for status, label in _STATUS_LABELS.items()
        if (count := sum(defect.status is status for defect in silent)) or status is DefectStatus.PRESENT
    ]
    jobs = f"a job with {format_non_implicit_features(used_features)}" if used_features else "any job"
    lines += [f"silent defects that reach {jobs}: {', '.join(counts)}", ""]
    lines += _describe_defects(silent, used_features)
    if slow:
        lines += ["defects that cost time or memory:", "", *_describe_defects(slow, used_features)]
    for upgrade in audit_report.upgrades:
        new = f", and has these new defects: {', '.join(upgrade.new_ids)}" if upgrade.new_ids else ""
        count = len(audit_report.present_silent_defects)
        remaining = f"{len(upgrade.remaining_ids) or 'none'} of the {count} defects"
        lines.append(f"megatron-core {upgrade.release} has {remaining} above{new}")
    if errors:
        lines.append(f"defects that end in an error: {', '.join(defect.entry.id for defect in errors)}")
    return lines


def _describe_defects(defects: Iterable[AuditedDefect], used_features: frozenset[str] | None) -> list[str]:
    """Return the paragraphs of the defects, present ones first."""
    order = list(DefectStatus)
    ordered = sorted(defects, key=lambda defect: order.index(defect.status))
    return [line for defect in ordered for line in (*_format_defect(defect, used_features), "")]


_STATUS_LABELS = {
    DefectStatus.PRESENT: "present",
    DefectStatus.MENDED: "mended by the framework",
    DefectStatus.CONDITIONAL: "mended by the framework in some jobs",
    DefectStatus.UNKNOWN: "unknown",
}


def _format_framework(package: Package) -> str:
    commit = f" at {package.commit[:12]}" if package.commit else ""
    version = f" {files.to_printable(package.version)}" if package.version else ""
    return f"{package.name}{version}{commit} in {files.to_printable(package.path)}"


def _format_defect(defect: AuditedDefect, used_features: frozenset[str] | None) -> list[str]:
    entry = defect.entry
    features = format_non_implicit_features(entry.when)
    unless = (
        ""
        if isinstance(entry, Patch) or not entry.unless
        else f" without {format_non_implicit_features(entry.unless)}"
    )
    if used_features is None:
        condition = f"  if you use {features}{unless}" if features else "  in any job"
    else:
        condition = f"  because you use {features}" if features else ""
    lines = [f"{defect.status.value.upper():<13}{entry.id}{condition}", _INDENT + entry.why]
    if defect.reason:
        lines.append(f"{_INDENT}{defect.reason}")
    if defect.status is not DefectStatus.MENDED:
        lines.append(f"{_INDENT}what to do: {' Or: '.join(_list_advice(defect))}")
    return lines


def _list_advice(defect: AuditedDefect) -> list[str]:
    """Return the remedies of a defect, the surest first."""
    entry = defect.entry
    advice = []
    if defect.fixing_minor:
        advice.append(f"Use megatron-core {defect.fixing_minor} or later.")
    if isinstance(entry, Patch):
        if defect.has_patch:
            assumption = (
                "" if entry.assumes in ("", NO_CALLER_ASSUMPTION) else f" (it assumes that {entry.assumes})"
            )
            advice.append(f"Apply mcore-bundle's patch {entry.id}{assumption}.")
    else:
        advice.append(entry.instead)
    return advice or ["Avoid one of these features, or open an issue. No known release or patch helps."]
