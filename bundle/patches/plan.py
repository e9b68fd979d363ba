"""All decisions about one megatron-core for one job, and the plan of patches that follows from them.

A plan is made before any import, stored as a file, and agreed on by all ranks.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from bundle.environment.packages import MegatronCopy, Packages
from bundle.errors import PatchError, UsageError, find_nearest, format_suggestion
from bundle.files import compute_short_json_digest
from bundle.patches import decision_rules, mindspeed, source
from bundle.patches.catalogue import PATCHES, SEAMS, TRAPS
from bundle.patches.decision_rules import PatchContext
from bundle.patches.definitions import Definitions
from bundle.patches.entry import Decision, PatchAction, Replacement
from bundle.patches.megatron_core import MegatronCore, ReviewTable
from bundle.patches.source import SourceTree

_PACKAGE_PARENT_DIRECTORY = Path(__file__).parents[2]  # the directory that holds the package `bundle`


class Survey(NamedTuple):
    """The decisions, their megatron-core, and the modules that were read for them."""

    core: MegatronCore
    decisions: tuple[Decision, ...]
    read_modules: tuple[str, ...] = ()

    def raise_for_blocking_decisions(self) -> None:
        """Raise UsageError for a recipe that meets traps, PatchError for a patch that cannot be applied."""
        stopping = [decision for decision in self.decisions if decision.stops]
        if traps := [decision.reason_line for decision in stopping if decision.action is PatchAction.TRAP]:
            raise UsageError("This recipe meets known defects of this megatron-core:", traps)
        if stopping:
            problems = [decision.reason_line for decision in stopping]
            raise PatchError("The job needs patches that cannot be applied:", problems)

    @property
    def patches_to_apply(self) -> tuple[Decision, ...]:
        """The patches to apply."""
        return tuple(decision for decision in self.decisions if decision.action is PatchAction.APPLY)


def survey_patches(
    core: MegatronCore,
    table: ReviewTable,
    stack: Packages,
    *,
    backend: str | None = None,
    features: frozenset[str] | None = None,
    requested: Collection[str] = (),
    allowed: Collection[str] = (),
    vouched: Collection[str] | None = None,
) -> Survey:
    """Return the decisions about all patches, traps and changed seams. Raises UsageError for unknown ids.

    `vouched` holds the ids of patches whose assumptions hold in somebody else's framework. None: the jobs are
    our own. Their processes import neither MindSpeed nor MegatronAdaptor, installed or not, except for a job
    whose recipe asks for MindSpeed.
    """
    patches_by_id = {patch.id: patch for patch in PATCHES}
    _check_ids({*requested, *allowed, *(vouched or ())}, patches_by_id)
    job = build_context(core, stack, backend=backend, features=features)
    trains_with_mindspeed = vouched is None and features is not None and "mindspeed" in features
    may_have_mindspeed = vouched is not None or trains_with_mindspeed
    job = replace(
        job,
        mindspeed=(
            job.mindspeed
            or _predict_mindspeed_by_megatron_version(
                core.version, trains_with_mindspeed=trains_with_mindspeed
            )
        )
        if may_have_mindspeed
        else None,
        trains_with_mindspeed=trains_with_mindspeed,
        unread_patcher=job.unread_patcher if may_have_mindspeed else None,
        requested=frozenset(requested),
        allowed=frozenset(allowed),
        vouched=None if vouched is None else frozenset(vouched),
    )
    reader = core.build_reader(table)
    decisions = [decision_rules.decide_patch(patch, reader.read(patch), job) for patch in PATCHES]
    other_decisions = [decision_rules.decide_trap(trap, reader.read(trap), job) for trap in TRAPS]
    other_decisions += [
        decision_rules.build_seam_drift_warning(seam, reader.read_seam_fingerprints(seam), job)
        for seam in SEAMS
    ]
    decisions += [decision for decision in other_decisions if decision is not None]
    return Survey(
        core, decision_rules.mark_conflicts(decisions, patches_by_id), reader.list_consulted_modules()
    )


def build_context(
    core: MegatronCore, stack: Packages, *, backend: str | None = None, features: frozenset[str] | None = None
) -> PatchContext:
    """Return what decisions about a megatron-core depend on besides its own code."""
    return PatchContext(
        version=core.version,
        backend=backend,
        features=_with_resolved_auto_attention(features, backend),
        packages=_read_versions(stack, {name for patch in PATCHES for name, _ in patch.requires}),
        mindspeed=(package.commit,) if (package := stack.find_package("mindspeed")) else None,
        unread_patcher=f"MegatronAdaptor {adaptor.version or 'of no version'}"
        if (adaptor := stack.find_package("megatron-adaptor"))
        else None,
        conflict=core.conflict,
    )


def _predict_mindspeed_by_megatron_version(
    version: str | None, *, trains_with_mindspeed: bool
) -> tuple[str] | None:
    """Return the commit of the MindSpeed that a job of ours would have where none is installed."""
    branch = mindspeed.find_branch_by_megatron_version(version) if trains_with_mindspeed and version else None
    return (branch.commit,) if branch else None


def _read_versions(stack: Packages, names: Collection[str]) -> dict[str, str]:
    """Return the versions of these packages, for those that are installed."""
    packages = {name: stack.find_package(name) for name in names}
    return {name: package.version for name, package in packages.items() if package and package.version}


def _with_resolved_auto_attention(
    features: frozenset[str] | None, backend: str | None
) -> frozenset[str] | None:
    """Return the features, with what `attention: auto` is taken for: on an accelerator, flash attention."""
    if features is None or "attention-auto" not in features or backend == "cpu":
        return features
    return features | {"attention-flash"}


def _check_ids(ids: Collection[str], known: Collection[str]) -> None:
    unknown = [
        f"{name}{format_suggestion(find_nearest(name, known))}" for name in sorted(ids) if name not in known
    ]
    if unknown:
        raise UsageError("Unknown ids of patches (`patches list` prints all ids):", unknown)


@dataclass(frozen=True)
class PatchStep:
    """One target and its wrapper, and what the target must be when they are applied. Files are relative."""

    patch: str
    target: str
    wrapper: str
    file: str  # of the target's module
    file_digest: str
    code_file: str  # of the code itself, which may be inherited or imported from elsewhere
    fingerprint: str
    wrapper_digest: str  # of the wrapper's module
    everywhere: bool  # modules that imported it by value get the replacement too


_STEP_FIELD_TYPES = {item.name: item.type for item in fields(PatchStep)}


@dataclass(frozen=True)
class PatchPlan:
    """The patches to apply to a megatron-core, and the decisions about all other entries."""

    version: str | None
    commit: str | None
    decisions: tuple[tuple[str, str], ...]  # (id, action)
    steps: tuple[PatchStep, ...]
    module_digests: tuple[
        tuple[str, str], ...
    ] = ()  # (module, digest of its file) of all that was read; "": not there

    def get_rank_invariant_fields(self) -> dict[str, str]:
        """Return the values by name that every rank must agree on: no paths, no host names."""
        agreed = {"megatron-core": _format_version(self.version, self.commit)}
        for patch_id, action in self.decisions:
            steps = [asdict(step) for step in self.steps if step.patch == patch_id]
            agreed[f"patch {patch_id}"] = f"{action} {compute_short_json_digest(steps)}" if steps else action
        return {**agreed, "files that decided the patches": compute_short_json_digest(self.module_digests)}

    @property
    def digest(self) -> str:
        """16 hexadecimal digits over all fields."""
        return compute_short_json_digest(self.get_rank_invariant_fields())

    def find_mismatches(self, core: MegatronCopy) -> Iterator[str]:
        """Yield each way in which a megatron-core, or this package, differs from the one in the plan."""
        actual, expected = (
            _format_version(core.version, core.commit),
            _format_version(self.version, self.commit),
        )
        if actual != expected:
            yield f"megatron-core: {expected} in the job, {actual} here"
            return
        for module, digest in self.module_digests:
            if source.compute_module_digest(core.root, module) != digest:
                file = source.find_module_file(core.root, module) or f"{module.replace('.', '/')}.py"
                yield f"{file} differs from the file that the patches were planned for"
        known_steps = {(patch.id, r.target, r.wrapper) for patch in PATCHES for r in patch.replacements}
        for step in self.steps:
            if (step.patch, step.target, step.wrapper) not in known_steps:
                yield f"patch {step.patch} of {step.target} is in the job, but not in this mcore-bundle"
            elif (
                source.compute_module_digest(_PACKAGE_PARENT_DIRECTORY, step.wrapper.partition(":")[0])
                != step.wrapper_digest
            ):
                yield f"{step.patch}: {step.wrapper.partition(':')[0]} differs here"

    def dump(self) -> dict[str, Any]:
        """Return the plan as plain JSON values, from which `load_patch_plan` makes an equal plan."""
        return {
            "schema": 2,
            "megatron-core": {"version": self.version, "commit": self.commit},
            "decisions": [list(decision) for decision in self.decisions],
            "steps": [asdict(step) for step in self.steps],
            "read": dict(self.module_digests),
        }


def load_patch_plan(document: Mapping[str, Any]) -> PatchPlan:
    """Return the plan that `PatchPlan.dump` wrote. Raises PatchError for anything else."""
    try:
        if document["schema"] != 2:
            raise ValueError(
                f"it has schema {document['schema']}, but this mcore-bundle reads schema 2. Make a new plan"
            )
        version_info = document["megatron-core"]
        decisions = tuple((str(patch_id), str(action)) for patch_id, action in document["decisions"])
        steps = tuple(PatchStep(**step) for step in document["steps"])
        if wrong_fields := [
            name
            for step in steps
            for name, value in asdict(step).items()
            if type(value) is not _STEP_FIELD_TYPES[name]
        ]:
            raise ValueError(f"steps: {wrong_fields[0]} has the wrong type")
        module_digests = tuple((str(module), str(digest)) for module, digest in document["read"].items())
        return PatchPlan(version_info["version"], version_info["commit"], decisions, steps, module_digests)
    except KeyError as error:
        raise PatchError(f"This plan of patches cannot be read: it has no key {error}") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise PatchError(f"This plan of patches cannot be read: {error}") from None


def _format_version(version: str | None, commit: str | None) -> str:
    return f"{version} {commit or ''}".strip()


def build_patch_plan(patch_survey: Survey) -> PatchPlan:
    """Return the plan for the survey of a tree.

    Raises as `Survey.raise_for_blocking_decisions`, and PatchError without a tree.
    """
    patch_survey.raise_for_blocking_decisions()
    root = patch_survey.core.root
    if root is None:
        version = patch_survey.core.version
        raise PatchError(f"megatron-core {version}: only the version is known, but patches need the source")
    applied_ids = {decision.id for decision in patch_survey.patches_to_apply}
    definitions = Definitions(SourceTree(root))
    steps = [
        step
        for patch in PATCHES
        if patch.id in applied_ids
        for replacement in patch.replacements
        if (step := _build_step(patch.id, replacement, definitions)) is not None
    ]
    decisions = tuple((decision.id, decision.action.value) for decision in patch_survey.decisions)
    modules = sorted({*patch_survey.read_modules, *(step.target.partition(":")[0] for step in steps)})
    module_digests = tuple((module, source.compute_module_digest(root, module)) for module in modules)
    return PatchPlan(
        patch_survey.core.version, patch_survey.core.commit, decisions, tuple(steps), module_digests
    )


def _build_step(patch_id: str, replacement: Replacement, definitions: Definitions) -> PatchStep | None:
    """Return the step for a target; None where an optional target is missing."""
    definition = definitions[replacement.target]
    if definition is None:
        return None
    module, _, name = replacement.target.partition(":")
    root = definitions.tree.root
    wrapper_module = replacement.wrapper.partition(":")[0]
    wrapper_digest = source.compute_module_digest(_PACKAGE_PARENT_DIRECTORY, wrapper_module)
    if not wrapper_digest:
        raise PatchError(f"patch {patch_id}: the module of its wrapper, {wrapper_module}, does not exist")
    return PatchStep(
        patch=patch_id,
        target=replacement.target,
        wrapper=replacement.wrapper,
        file=source.find_module_file(root, module) or "",
        file_digest=source.compute_module_digest(root, module),
        code_file=definition.file,
        fingerprint=definition.fingerprint,
        wrapper_digest=wrapper_digest,
        everywhere="." not in name and definition.module == module and definition.is_function_or_class,
    )
