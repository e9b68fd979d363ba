"""`mcore-bundle patches audit`: the silent defects of somebody's environment, and what mends them."""

import json
from collections.abc import Iterable
from typing import Any

import typer

from bundle import files
from bundle.environment import interpreters, packages
from bundle.environment.packages import Package, Stack
from bundle.errors import EnvironmentUnfit, ExitCode
from bundle.patches import hook
from bundle.patches.audit import Audit, Defect, Standing
from bundle.patches.audit import audit as examine
from bundle.patches.entry import NOTHING, DefectKind, Patch, known_features, shown_features
from bundle.patches.hook import Hook, Words
from bundle.patches.subject import Subject, Table, installed, load, named

_INDENT = " " * 13


def audit(env: str, mcore: str, features: str, *, as_json: bool) -> None:
    """Prints the silent defects; ends with 4 where one reaches the jobs."""
    used, table = known_features(features.split(",")), load()
    stack = Stack(interpreters.search_path_of(env)) if env else packages.detect()
    if not env and not mcore and stack.megatron.core is None and (active := interpreters.active()):
        stack = Stack(interpreters.search_path_of(env := active))
    found = examine(_subject(mcore, stack, table, env), table, stack, used)
    hooks = hook.found(interpreters.sites_in(env) if env else interpreters.own_sites())
    document = {**_document(found, env, used), "hooks": [_hook(each) for each in hooks]}
    print(json.dumps(document, indent=2) if as_json else "\n".join(_lines(found, used, hooks)))
    if found.reaching:
        raise typer.Exit(int(ExitCode.PATCHES))


def _subject(mcore: str, stack: Stack, table: Table, env: str) -> Subject:
    if mcore:
        return named(mcore, table)
    if stack.megatron.core is None:
        archive = stack.megatron.archive
        why = f"its megatron-core is in a zip: {archive}" if archive else "there is no megatron-core"
        where = files.printable(env or "this environment")
        raise EnvironmentUnfit(f"{where}: {why}; name another by --env PYTHON, or a tree by --mcore PATH")
    return installed(stack, table)


def _document(found: Audit, env: str, used: frozenset[str] | None) -> dict[str, Any]:
    return {
        "schema": 2,
        "environment": env or None,
        "mcore": found.subject.as_json(),
        "frameworks": [
            {"name": p.name, "version": p.version, "commit": p.commit, "path": str(p.path)}
            for p in found.frameworks
        ],
        "features": None if used is None else sorted(used),
        "reaching": [defect.entry.id for defect in found.reaching],
        "defects": [_row(defect) for defect in found.defects],
        "upgrades": [
            {"release": upgrade.release, "left": upgrade.left, "new": upgrade.new}
            for upgrade in found.upgrades
        ],
    }


def _hook(of: Hook) -> dict[str, Any]:
    said = of.words._asdict() if of.words else dict.fromkeys(Words._fields)
    return {"file": str(of.file), **said, "fault": of.fault or None}


def _row(defect: Defect) -> dict[str, Any]:
    entry = defect.entry
    ours = isinstance(entry, Patch)
    return {
        "id": entry.id,
        "standing": defect.standing.value,
        "kind": entry.kind.value,
        "proven": defect.proven,
        "reason": defect.reason,
        "features": sorted(entry.when),
        "unless": [] if isinstance(entry, Patch) else sorted(entry.unless),
        "why": entry.why,
        "replaced_by": [
            {"framework": p.framework, "target": p.target, "place": p.place, "when": p.when}
            for p in defect.patched_by
        ],
        "mended_in": defect.mended_in,
        "instead": None if isinstance(entry, Patch) else entry.instead,
        "patch": ours and defect.applies,
        "assumes": entry.assumes if isinstance(entry, Patch) else "",
    }


def _lines(found: Audit, used: frozenset[str] | None, hooks: Iterable[Hook]) -> list[str]:
    lines = [str(found.subject), *map(_framework, found.frameworks)]
    for finding in hook.findings(hooks):
        then = finding.fix or "what follows is so without them"
        lines.append(f"{finding.subject}: {finding.cause}; {then}")
    silent, errors, slow = ([d for d in found.defects if d.entry.kind is kind] for kind in DefectKind)
    counts = [
        f"{count} {what}"
        for standing, what in _COUNTED.items()
        if (count := sum(defect.standing is standing for defect in silent)) or standing is Standing.PRESENT
    ]
    of = f"a job with {shown_features(used)}" if used else "whatever is used"
    lines += [f"silent defects that reach {of}: {', '.join(counts)}", ""]
    lines += _describe_defects(silent, used)
    if slow:
        lines += ["defects that cost time or memory:", "", *_describe_defects(slow, used)]
    for upgrade in found.upgrades:
        new = f", and brings {', '.join(upgrade.new)}" if upgrade.new else ""
        left = f"{len(upgrade.left)} of the {len(found.reaching)}"
        lines.append(f"megatron-core {upgrade.release} still has {left}{new}")
    if errors:
        lines.append(f"defects that end in an error: {', '.join(defect.entry.id for defect in errors)}")
    return lines


def _describe_defects(defects: Iterable[Defect], used: frozenset[str] | None) -> list[str]:
    """Return the paragraphs of the defects, those that are present first."""
    order = list(Standing)
    ordered = sorted(defects, key=lambda defect: order.index(defect.standing))
    return [line for defect in ordered for line in (*_said(defect, used), "")]


_COUNTED = {
    Standing.PRESENT: "there",
    Standing.MENDED: "mended by the framework",
    Standing.CONDITIONAL: "mended by the framework in some jobs",
    Standing.UNKNOWN: "unknown",
}


def _framework(package: Package) -> str:
    commit = f" at {package.commit[:12]}" if package.commit else ""
    version = f" {files.printable(package.version)}" if package.version else ""
    return f"{package.name}{version}{commit} in {files.printable(package.path)}"


def _said(defect: Defect, used: frozenset[str] | None) -> list[str]:
    entry = defect.entry
    met = shown_features(entry.when)
    unless = (
        "" if isinstance(entry, Patch) or not entry.unless else f" without {shown_features(entry.unless)}"
    )
    if used is None:
        condition = f"  if you use {met}{unless}" if met else "  in any job"
    else:
        condition = f"  by {met}" if met else ""
    lines = [f"{defect.standing.value.upper():<13}{entry.id}{condition}", _INDENT + entry.why]
    if defect.reason:
        lines.append(f"{_INDENT}{defect.reason}")
    if defect.standing is not Standing.MENDED:
        lines.append(f"{_INDENT}what to do: {'; '.join(_advice(defect))}")
    return lines


def _advice(defect: Defect) -> list[str]:
    """What can be done, the surest first."""
    entry = defect.entry
    said = []
    if defect.mended_in:
        said.append(f"megatron-core {defect.mended_in} or later does not have it")
    if isinstance(entry, Patch):
        if defect.applies:
            assumed = "" if entry.assumes in ("", NOTHING) else f" (it assumes that {entry.assumes})"
            said.append(f"mcore-bundle's patch {entry.id} mends it{assumed}")
    else:
        said.append(entry.instead)
    return said or [
        "do without one of these features, or ask us: no release and no patch is known to mend it"
    ]
