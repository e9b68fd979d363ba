"""All that is decided about one megatron-core for one job, and the plan of patches that this leads to.

A plan is made before any import, kept as a file, and agreed on by all ranks.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from bundle.environment.packages import Copy, Packages
from bundle.errors import PatchError, UsageError, did_you_mean, nearest
from bundle.files import json_digest
from bundle.patches import deciding, mindspeed, source
from bundle.patches.catalogue import PATCHES, SEAMS, TRAPS
from bundle.patches.deciding import PatchContext
from bundle.patches.definitions import Definitions
from bundle.patches.entry import Action, Decision, Replacement
from bundle.patches.source import SourceTree
from bundle.patches.subject import Subject, Table

_BUNDLE = Path(__file__).parents[2]  # what holds the package `bundle`


class Survey(NamedTuple):
    """The decisions, the megatron-core that they are about, and the modules that were read for them."""

    subject: Subject
    decisions: tuple[Decision, ...]
    read: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises UsageError for a recipe that meets traps, PatchError for a patch that cannot be applied."""
        stopping = [decision for decision in self.decisions if decision.stops]
        if traps := [decision.problem for decision in stopping if decision.action is Action.TRAP]:
            raise UsageError("This recipe meets known defects of this megatron-core:", traps)
        if stopping:
            problems = [decision.problem for decision in stopping]
            raise PatchError("The job needs patches that cannot be applied:", problems)

    @property
    def applied(self) -> tuple[Decision, ...]:
        """The patches to apply."""
        return tuple(decision for decision in self.decisions if decision.action is Action.APPLY)


def survey(
    of: Subject,
    table: Table,
    stack: Packages,
    *,
    backend: str | None = None,
    features: frozenset[str] | None = None,
    requested: Collection[str] = (),
    allowed: Collection[str] = (),
    vouched: Collection[str] | None = None,
) -> Survey:
    """The decision about every patch, trap and changed seam. Raises UsageError for unknown ids.

    `vouched`: what somebody else's framework is known to be; None: the jobs are our own, whose processes
    import neither MindSpeed nor MegatronAdaptor, whether they are installed or not, but for the job whose
    recipe asks for it.
    """
    known = {patch.id: patch for patch in PATCHES}
    _check_ids({*requested, *allowed, *(vouched or ())}, known)
    job = context(of, stack, backend=backend, features=features)
    adapted = vouched is None and features is not None and "mindspeed" in features
    theirs = vouched is not None or adapted
    job = replace(
        job,
        mindspeed=(job.mindspeed or _to_come(of.version, adapted=adapted)) if theirs else None,
        adapted=adapted,
        unread=job.unread if theirs else None,
        requested=frozenset(requested),
        allowed=frozenset(allowed),
        vouched=None if vouched is None else frozenset(vouched),
    )
    reader = of.reader(table)
    decisions = [deciding.decide(patch, reader.read(patch), job) for patch in PATCHES]
    others = [deciding.decide_trap(trap, reader.read(trap), job) for trap in TRAPS]
    others += [deciding.decide_seam(seam, reader.look(seam), job) for seam in SEAMS]
    decisions += [decision for decision in others if decision is not None]
    return Survey(of, deciding.exclude(decisions, known), reader.read_so_far())


def context(
    of: Subject, stack: Packages, *, backend: str | None = None, features: frozenset[str] | None = None
) -> PatchContext:
    """What decisions about a megatron depend on, beside its own code."""
    return PatchContext(
        version=of.version,
        backend=backend,
        features=_assumed(features, backend),
        packages=_versions(stack, {name for patch in PATCHES for name, _ in patch.requires}),
        mindspeed=(found.commit,) if (found := stack.package("mindspeed")) else None,
        unread=f"MegatronAdaptor {a.version or 'of no version'}"
        if (a := stack.package("megatron-adaptor"))
        else None,
        conflict=of.conflict,
    )


def _to_come(version: str | None, *, adapted: bool) -> tuple[str] | None:
    """The commit of the MindSpeed that a job of ours would have where none is installed."""
    branch = mindspeed.made_for(version) if adapted and version else None
    return (branch.commit,) if branch else None


def _versions(stack: Packages, names: Collection[str]) -> dict[str, str]:
    """The versions of those of these packages that are installed."""
    found = {name: stack.package(name) for name in names}
    return {name: package.version for name, package in found.items() if package and package.version}


def _assumed(features: frozenset[str] | None, backend: str | None) -> frozenset[str] | None:
    """The features, with what `attention: auto` is taken for: an accelerator's kernels are flash kernels."""
    if features is None or "attention-auto" not in features or backend == "cpu":
        return features
    return features | {"attention-flash"}


def _check_ids(ids: Collection[str], known: Collection[str]) -> None:
    unknown = [f"{name}{did_you_mean(nearest(name, known))}" for name in sorted(ids) if name not in known]
    if unknown:
        raise UsageError("There are no patches with these ids; `patches list` names them all:", unknown)


@dataclass(frozen=True)
class Step:
    """One target and its wrapper, with what must be found there when it is applied. Files are relative."""

    patch: str
    target: str
    wrapper: str
    file: str  # of the target's module
    file_digest: str
    code_file: str  # of the code itself, which may be inherited or imported from elsewhere
    fingerprint: str
    wrapper_digest: str  # of the wrapper's module
    everywhere: bool  # modules that imported it by value get the replacement too


_KINDS = {item.name: item.type for item in fields(Step)}


@dataclass(frozen=True)
class PatchPlan:
    """What will be patched in which megatron-core, and what was decided about everything else."""

    version: str | None
    commit: str | None
    decisions: tuple[tuple[str, str], ...]  # (id, action)
    steps: tuple[Step, ...]
    read: tuple[tuple[str, str], ...] = ()  # (module, digest of its file) of all that was read; "": not there

    def fields(self) -> dict[str, str]:
        """What every rank must agree on, by name: no paths, no host names."""
        found = {"megatron-core": _name(self.version, self.commit)}
        for patch_id, action in self.decisions:
            steps = [asdict(step) for step in self.steps if step.patch == patch_id]
            found[f"patch {patch_id}"] = f"{action} {json_digest(steps)}" if steps else action
        return {**found, "files that the patches were decided by": json_digest(self.read)}

    @property
    def digest(self) -> str:
        """16 hexadecimal digits over all fields."""
        return json_digest(self.fields())

    def misfits(self, core: Copy) -> Iterator[str]:
        """Every way in which a megatron-core, or this package, is not what the plan was made with."""
        here, planned = _name(core.version, core.commit), _name(self.version, self.commit)
        if here != planned:
            yield f"megatron-core: {planned} in the job, {here} here"
            return
        for module, digest in self.read:
            if source.digest(core.root, module) != digest:
                file = source.module_file(core.root, module) or f"{module.replace('.', '/')}.py"
                yield f"{file} is not the file that the patches were planned for"
        ours = {(patch.id, r.target, r.wrapper) for patch in PATCHES for r in patch.replacements}
        for step in self.steps:
            if (step.patch, step.target, step.wrapper) not in ours:
                yield f"{step.patch}: not a patch of this mcore-bundle"
            elif source.digest(_BUNDLE, step.wrapper.partition(":")[0]) != step.wrapper_digest:
                yield f"{step.patch}: {step.wrapper.partition(':')[0]} is another one here"

    def dump(self) -> dict[str, Any]:
        """The plan as plain JSON values; `load` makes an equal plan of them."""
        return {
            "schema": 2,
            "megatron-core": {"version": self.version, "commit": self.commit},
            "decisions": [list(decision) for decision in self.decisions],
            "steps": [asdict(step) for step in self.steps],
            "read": dict(self.read),
        }


def load(document: Mapping[str, Any]) -> PatchPlan:
    """The plan that `PatchPlan.dump` wrote. Raises PatchError for anything else."""
    try:
        if document["schema"] != 2:
            raise ValueError(f"schema {document['schema']}")
        of = document["megatron-core"]
        decisions = tuple((str(patch_id), str(action)) for patch_id, action in document["decisions"])
        steps = tuple(Step(**step) for step in document["steps"])
        if wrong := [
            name for step in steps for name, value in asdict(step).items() if type(value) is not _KINDS[name]
        ]:
            raise ValueError(f"steps: {wrong[0]} is of another kind")
        read = tuple((str(module), str(digest)) for module, digest in document["read"].items())
        return PatchPlan(of["version"], of["commit"], decisions, steps, read)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PatchError(f"This is no plan of patches: {type(error).__name__}: {error}") from None


def _name(version: str | None, commit: str | None) -> str:
    return f"{version} {commit or ''}".strip()


def make(decided: Survey) -> PatchPlan:
    """The plan that the survey of a tree leads to. Raises as `Survey.check`, and PatchError for no tree."""
    decided.check()
    root = decided.subject.root
    if root is None:
        raise PatchError(f"megatron-core {decided.subject.version} is a version without a tree to patch")
    applied = {decision.id for decision in decided.applied}
    definitions = Definitions(SourceTree(root))
    steps = [
        step
        for patch in PATCHES
        if patch.id in applied
        for replacement in patch.replacements
        if (step := _step(patch.id, replacement, definitions)) is not None
    ]
    decisions = tuple((decision.id, decision.action.value) for decision in decided.decisions)
    modules = sorted({*decided.read, *(step.target.partition(":")[0] for step in steps)})
    read = tuple((module, source.digest(root, module)) for module in modules)
    return PatchPlan(decided.subject.version, decided.subject.commit, decisions, tuple(steps), read)


def _step(patch_id: str, replacement: Replacement, definitions: Definitions) -> Step | None:
    """The step for a target; None where an optional one is not there."""
    found = definitions[replacement.target]
    if found is None:
        return None
    module, _, name = replacement.target.partition(":")
    root = definitions.tree.root
    wrapper_module = replacement.wrapper.partition(":")[0]
    wrapper_digest = source.digest(_BUNDLE, wrapper_module)
    if not wrapper_digest:
        raise PatchError(f"{patch_id}: there is no module {wrapper_module}")
    return Step(
        patch=patch_id,
        target=replacement.target,
        wrapper=replacement.wrapper,
        file=source.module_file(root, module) or "",
        file_digest=source.digest(root, module),
        code_file=found.file,
        fingerprint=found.fingerprint,
        wrapper_digest=wrapper_digest,
        everywhere="." not in name and found.module == module and found.is_code,
    )
