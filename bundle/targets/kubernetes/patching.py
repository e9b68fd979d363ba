"""Patches that users merge into the objects of a job: `--patch FILE`, for what no option says.

A file has YAML documents with a `kind`: that of an object, or `Pod` for every template of pods. Maps are
merged key by key, null removes a key, and lists whose entries all have a `name` are merged by that name.
Other lists are replaced.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from bundle.errors import UsageError

_POD_TEMPLATE_PATCH_KIND = "Pod"


def read_patches(path: Path) -> list[dict[str, Any]]:
    """Return the documents of a file. Raise UsageError where it cannot be read or a document has no kind."""
    try:
        documents = [*YAML(typ="safe", pure=True).load_all(path.read_text())]
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise UsageError(f"--patch {path}: is not readable YAML ({error})") from error
    if not documents or not all(isinstance(patch, dict) and patch.get("kind") for patch in documents):
        raise UsageError(
            f"--patch {path}: each document must be a map with a `kind`, such as"
            f" {_POD_TEMPLATE_PATCH_KIND} or Job"
        )
    return documents


def apply_patches(manifests: Sequence[dict[str, Any]], patches: Sequence[Mapping[str, Any]]) -> None:
    """Merge patches into objects, in place.

    Raise UsageError with every patch whose kind no object has, or that changes the name or the labels of an
    object: they identify the job.
    """
    identities = [_get_protected_metadata(manifest) for manifest in manifests]
    kinds = {manifest["kind"] for manifest in manifests}
    allowed_kinds = kinds | {_POD_TEMPLATE_PATCH_KIND}
    wrong = [
        f"kind {patch['kind']}: the job has no such object, only {', '.join(sorted(allowed_kinds))}"
        for patch in patches
        if patch["kind"] not in allowed_kinds
    ]
    for patch in patches:
        changes = {key: value for key, value in patch.items() if key not in ("kind", "apiVersion")}
        for target in [value for manifest in manifests for value in _find_targets(manifest, patch["kind"])]:
            _apply_strategic_merge(target, changes)
    wrong += [
        f"kind {manifest['kind']}: a patch cannot change its name, its namespace or the labels of"
        " mcore-bundle"
        for manifest, identity in zip(manifests, identities, strict=True)
        if not _has_protected_metadata(manifest, identity)
    ]
    if wrong:
        raise UsageError("--patch: cannot be applied", wrong)


def _find_targets(manifest: dict[str, Any], kind: str) -> Iterator[dict[str, Any]]:
    if kind == _POD_TEMPLATE_PATCH_KIND:
        yield from _find_templates(manifest)
    elif manifest["kind"] == kind:
        yield manifest


def _find_templates(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every template of pods within an object."""
    if isinstance(value, dict):
        spec = value.get("spec")
        if isinstance(spec, dict) and "containers" in spec:
            yield value
        else:
            for inner in value.values():
                yield from _find_templates(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _find_templates(inner)


def _apply_strategic_merge(target: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, change in changes.items():
        current = target.get(key)
        if change is None:
            target.pop(key, None)
        elif isinstance(change, dict):
            if not isinstance(current, dict):
                target[key] = current = {}
            _apply_strategic_merge(current, change)
        elif isinstance(current, list) and _has_names(current) and _has_names(change):
            target[key] = _merge_lists(current, change)
        else:
            target[key] = change


def _merge_lists(current: Sequence[dict[str, Any]], changes: Any) -> list[dict[str, Any]]:
    entries = {entry["name"]: entry for entry in current}
    for change in changes:
        _apply_strategic_merge(entries.setdefault(change["name"], {}), change)
    return [*entries.values()]


def _has_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) and "name" in entry for entry in value)


def _get_protected_metadata(manifest: Mapping[str, Any]) -> tuple[Any, Any, dict[str, str]]:
    metadata = manifest["metadata"]
    return metadata["name"], metadata.get("namespace"), dict(metadata["labels"])


def _has_protected_metadata(manifest: Mapping[str, Any], identity: tuple[Any, Any, dict[str, str]]) -> bool:
    metadata = manifest.get("metadata") or {}
    name, namespace, labels = identity
    is_same = metadata.get("name") == name and metadata.get("namespace") == namespace
    return is_same and labels.items() <= (metadata.get("labels") or {}).items()
