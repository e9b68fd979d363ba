"""Defects where a framework has replaced functions of megatron-core by its own.

The catalogue's checks of megatron-core's source run once more, with the framework's functions in the places
that its monkey patches give them. So the framework's own code says whether it mends a defect or brings one.
"""

import ast
import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from bundle import files
from bundle.environment.packages import Package
from bundle.patches import monkey_patches
from bundle.patches.definitions import Definitions
from bundle.patches.entry import Patch, Trap
from bundle.patches.megatron_core import DefectReader, ReviewTable
from bundle.patches.monkey_patches import CodeNode, MonkeyPatch
from bundle.patches.source import Module, SourceTree, UnreadableSource, collect_bindings
from bundle.patches.syntax import fingerprint_code

# Frameworks' wrappers that were read: (target, fingerprint) -> ids of mended patches, and the source.
FIXES_BY_WRAPPER_FINGERPRINT: Mapping[tuple[str, str], tuple[frozenset[str], str]] = {
    ("megatron.core.transformer.moe.router:TopKRouter._apply_expert_bias", "96b4058d9af2ce4b"): (
        frozenset({"padding-mask-expert-bias"}),
        "NVIDIA-NeMo/Megatron-Bridge at 067f987df: masks become [t, 1] wherever there is an expert bias",
    ),
}


@dataclass(frozen=True)
class PatchedMegatronTree(SourceTree):
    """A megatron tree in which some names are bound to a framework's functions."""

    original: SourceTree = field(kw_only=True)
    patches: tuple[MonkeyPatch, ...] = field(kw_only=True)

    def find_module(self, name: str) -> Module | None:
        """Return the parsed module, with the framework's functions in it."""
        if name not in self._modules:
            module = self.original.find_module(name)
            for patch in self.patches if module else ():
                if patch.module == name and module is not None:
                    module = module._replace(
                        bindings=module.bindings | _build_patched_bindings(module, patch)
                    )
            self._modules[name] = module
        return self._modules[name]


def _build_patched_bindings(module: Module, patch: MonkeyPatch) -> dict[str, list[ast.stmt]]:
    """Return the bindings that a monkey patch changes; for a method, its class with the new method."""
    owner, _, name = patch.name.rpartition(".")
    new = _rename_code(patch.code, name)
    if not owner:
        return {name: [new]}
    classes = [node for node in module.bindings.get(owner, ()) if isinstance(node, ast.ClassDef)]
    return {owner: [_with_member(node, name, new) for node in classes]}


def _rename_code(code: CodeNode | None, name: str) -> ast.stmt:
    """Return the code under the name that it replaces; for unknown code, an assignment of `...`."""
    if code is None:
        return ast.Assign([ast.Name(name)], ast.Constant(...))
    renamed = copy.copy(code)
    renamed.name = name
    return renamed


def _with_member(owner: ast.ClassDef, name: str, member: ast.stmt) -> ast.ClassDef:
    changed = copy.copy(owner)
    changed.body = [*(node for node in owner.body if name not in collect_bindings([node])), member]
    return changed


@dataclass(frozen=True)
class PatchedReader(DefectReader):
    """A reader of a megatron-core in which the monkey patches of frameworks are in place."""

    original: Definitions = field(kw_only=True)
    patches: tuple[MonkeyPatch, ...] = field(kw_only=True)

    def find_evidence_changing_patches(self, entry: Patch | Trap) -> tuple[MonkeyPatch, ...]:
        """Return the monkey patches that change what is read about an entry."""
        changed = {target for target in entry.evidence_targets if self._differs(target)}
        return tuple(
            patch
            for patch in self.patches
            if any(_is_target_or_member_patch(patch, target, self) for target in changed)
        )

    def _differs(self, target: str) -> bool:
        assert self.definitions is not None
        try:
            before, after = self.original[target], self.definitions[target]
        except UnreadableSource:
            return False
        if before is None or after is None:
            return before is not after
        return before.nodes != after.nodes and before.fingerprint != after.fingerprint


def _is_target_or_member_patch(patch: MonkeyPatch, target: str, reader: PatchedReader) -> bool:
    """Return whether the monkey patch replaces the target, a member of it, or a method that it inherits."""
    assert reader.definitions is not None
    definition, owner = reader.definitions[target], patch.name.partition(".")[0]
    if definition is None or definition.module != patch.module:
        return False
    name = target.partition(":")[2]
    return name.rpartition(".")[2] == patch.name.rpartition(".")[2] or name == owner


def find_monkey_patches(
    packages: Iterable[Package], megatron: Definitions, entries: Iterable[Patch | Trap]
) -> tuple[MonkeyPatch, ...]:
    """Return the monkey patches of frameworks on the evidence of these entries, or on their targets."""
    targets = {target for entry in entries for target in entry.evidence_targets}
    targets |= {r.target for entry in entries if isinstance(entry, Patch) for r in entry.replacements}
    patches = (
        patch for package in packages for patch in monkey_patches.find_in_package(package, megatron, targets)
    )
    return tuple(_with_later_import_condition(patch, megatron) for patch in patches)


def _with_later_import_condition(patch: MonkeyPatch, megatron: Definitions) -> MonkeyPatch:
    """Return the monkey patch, with one more condition where megatron-core imports its function by value.

    The condition is that the importing module is imported later: an earlier import keeps the original
    function.
    """
    module = patch.module.rpartition(".")[2]
    by_value = re.compile(
        rf"^\s*from\s+[\w.]*\b{module}\s+import\s+(\([^)]*|[^\n(]*)\b{re.escape(patch.name)}\b", re.M
    )
    for file in sorted((megatron.tree.root / "megatron/core").rglob("*.py")) if "." not in patch.name else ():
        if by_value.search(files.read_text_if_small(file) or ""):
            importer = file.relative_to(megatron.tree.root).as_posix()
            return replace(patch, conditions=(*patch.conditions, f"{importer} is imported after this line"))
    return patch


def build_patched_reader(
    megatron: Definitions, table: ReviewTable, patches: Iterable[MonkeyPatch]
) -> PatchedReader:
    """Return a reader of a megatron-core with these monkey patches; those that only wrap change nothing."""
    replacing = tuple(patch for patch in patches if not patch.wraps)
    tree = PatchedMegatronTree(megatron.tree.root, original=megatron.tree, patches=replacing)
    return PatchedReader(None, Definitions(tree), table, original=megatron, patches=replacing)


def find_wrapping_patches(entry: Patch, patches: Iterable[MonkeyPatch]) -> tuple[MonkeyPatch, ...]:
    """Return the monkey patches that wrap a target of our patch. They may mend the same defect."""
    targets = {replacement.target for replacement in entry.replacements}
    return tuple(patch for patch in patches if patch.wraps and patch.target in targets)


def is_fixed_by_reviewed_wrapper(entry: Patch, patch: MonkeyPatch) -> bool:
    """Return whether this wrapper was read and mends the patch's defect."""
    known_fix = (
        FIXES_BY_WRAPPER_FINGERPRINT.get((patch.target, fingerprint_code([patch.code])), None)
        if patch.code
        else None
    )
    return known_fix is not None and entry.id in known_fix[0]
