"""The plan: everything that a job will be on a machine with a megatron-core, and every reason against it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from packaging.version import Version

from bundle import capabilities
from bundle.architectures.config import IGNORED
from bundle.capabilities import Capabilities, Choice, Peak, Variable
from bundle.environment import packages
from bundle.environment.hardware import NAMES, detect, preset
from bundle.environment.machine import Hardware
from bundle.environment.packages import MegatronCode, Packages
from bundle.errors import BundleError, EnvironmentUnfit, ExitCode, PatchError, UsageError
from bundle.patches import mindspeed, subject
from bundle.patches.plan import Survey, survey
from bundle.patches.subject import DEFAULT, Subject, Table
from bundle.planning.layout import RankLayout, can_lay_out, rank_layout
from bundle.planning.memory import MemoryEstimate, advise_micro_batch_size, estimates, memory_note
from bundle.planning.problems import (
    Problem,
    backend_problems,
    devices_problems,
    environment_problems,
    layout_problems,
    memory_problems,
    mindspeed_problems,
    patch_problems,
    recipe_problem,
)
from bundle.planning.size import ModelSize, model_size
from bundle.recipe import Recipe

if TYPE_CHECKING:
    from bundle.patches.plan import PatchPlan

# The gravest first: a recipe has to be changed before a machine is worth looking for.
_ERRORS: dict[ExitCode, type[BundleError]] = {
    ExitCode.USAGE: UsageError,
    ExitCode.ENVIRONMENT_UNFIT: EnvironmentUnfit,
    ExitCode.PATCHES: PatchError,
}
_ORDER = tuple(_ERRORS)


class Target(NamedTuple):
    """The megatron-core that is planned for: its version, and where that was read."""

    version: str
    origin: str

    @property
    def release(self) -> Version:
        """The release number alone, by which releases are compared."""
        return Version(Version(self.version).base_version)


class Plan(NamedTuple):
    """All that will happen. `layout` is None, and `memory` empty, where the ranks cannot be laid out."""

    recipe: Recipe
    hardware: Hardware
    target: Target
    nodes: int
    per_node: int
    size: ModelSize
    peak: Peak | None  # of a device, where it is known
    layout: RankLayout | None
    memory: tuple[MemoryEstimate, ...]  # of every pipeline stage
    attention: Choice
    patches: Survey
    environment: tuple[Variable, ...]
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]
    weights: str = ""  # what the model begins with; "": not looked at, or not to be loaded
    allow_drift: tuple[str, ...] = ()  # patches that drifted, and do not stop it

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.nodes * self.per_node

    @property
    def code(self) -> ExitCode:
        """What a command that was asked to run this should end with."""
        codes = {problem.code for problem in self.problems}
        return next((code for code in _ORDER if code in codes), ExitCode.OK)

    @property
    def step_tokens(self) -> int:
        """The most tokens that a step can train on: samples may be shorter, and packs not full."""
        return self.recipe.train.global_batch_size * self.recipe.data.sequence_length

    @property
    def step_flops(self) -> int:
        """FLOPs of such a step, if every sample is one sequence (see `ModelSize`)."""
        of_one = self.size.training_flops([self.recipe.data.sequence_length])
        return self.recipe.train.global_batch_size * of_one

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint, over all ranks."""
        return self.size.checkpoint_bytes(self.recipe.model.dtype, self.recipe.optimizer)

    @property
    def export_bytes(self) -> int:
        """Bytes of one export at most; 0 where none is asked for."""
        return self.size.export_bytes(self.recipe.model.dtype, self.recipe.checkpoint.export)

    @property
    def variables(self) -> dict[str, str]:
        """The environment that ranks are started with."""
        return {variable.name: variable.value for variable in self.environment}

    @property
    def patch_plan(self) -> "PatchPlan":
        """What will be patched in the target, of which there must be a tree. Raises PatchError."""
        # Who only asks for a plan does not read megatron's sources: that takes as long as all the rest.
        from bundle.patches.plan import make

        return make(self.patches)

    def refuse(self) -> None:
        """Raises what `refuse` does."""
        refuse(self.recipe, self.problems)


def refuse(recipe: Recipe, problems: Sequence[Problem]) -> None:
    """Raises the gravest problem's error with all problems in it; does nothing when there is none."""
    for code, error in _ERRORS.items():
        if any(problem.code is code for problem in problems):
            raise error(f"recipe {recipe.name} cannot run here", [problem.text for problem in problems])


def with_kernel(features: frozenset[str], attention: str) -> frozenset[str]:
    """A job's features with the attention kernel that it gets."""
    return features - {"attention-auto"} | {f"attention-{attention}"}


def plan_for(
    recipe: Recipe,
    *,
    backend: str | None = None,
    named: str | None = None,
    mcore: str = "",
    allow_drift: Sequence[str] = (),
    nodes: int | None = None,
    per_node: int | None = None,
    beside: Sequence[Problem] = (),
    weights: str = "",
    others: Packages | None = None,
) -> Plan:
    """The plan of a recipe; what is None comes from the recipe and from this machine.

    `named` is a machine to plan for instead of this one, `mcore` a version or a tree instead of what is
    installed, `others` the packages of another place, `beside` problems and `weights` what the model begins
    with, that were found elsewhere. Raises
    UsageError and EnvironmentUnfit where there is nothing to plan with.
    """
    hardware, notes = machine(recipe.backend, backend, named)
    can = capabilities.of(hardware.backend, recipe.features)
    kernel = can.attention(recipe, hardware.generation.value).value
    features = with_kernel(recipe.features, kernel)
    target, decided = _megatron(features, hardware, mcore, allow_drift, others)
    code = MegatronCode(target.release, decided.subject.root)
    there = others or (packages.detect() if named is None else None)
    made = plan_on(
        recipe,
        hardware,
        target,
        decided,
        nodes=nodes,
        per_node=per_node,
        notes=notes,
        beside=(*beside, *mindspeed_problems(recipe, can, code, there)),
        installed=others or packages.detect(),
    )
    return made._replace(weights=weights, allow_drift=tuple(allow_drift))


def plan_on(
    recipe: Recipe,
    hardware: Hardware,
    target: Target,
    decided: Survey,
    *,
    nodes: int | None = None,
    per_node: int | None = None,
    notes: Sequence[str] = (),
    beside: Sequence[Problem] = (),
    installed: Packages | None = None,
) -> Plan:
    """The plan for a machine and a megatron-core that are known, with every problem in it.

    `nodes` and `per_node` override the recipe, `beside` are problems that somebody else found, `installed`
    are the packages there, where they are known.
    """
    can = capabilities.of(hardware.backend, recipe.features)
    code = MegatronCode(target.release, decided.subject.root)
    nodes = nodes or recipe.devices.nodes
    per_node = per_node or recipe.devices.per_node or _all_devices(recipe, hardware, nodes)
    world = nodes * per_node
    layout = rank_layout(recipe, world) if can_lay_out(recipe, world) else None
    traits = can.layers_of(recipe, hardware.generation.value)
    stages = () if layout is None else estimates(recipe, layout, traits, code)
    device = hardware.device_memory
    own = (
        memory_note(stages, device),
        None if layout is None else advise_micro_batch_size(recipe, layout, traits, code, device),
        _caution(can, installed),
        _triton(can, target, decided),
        _mindspeed(recipe, can, target),
        _delta_nets(recipe, can),
        _note_ignored_keys(recipe),
    )
    processors = hardware.host.processors.value
    environment = can.variables(
        recipe.features,
        nodes,
        recipe.environment,
        generation=hardware.generation.value,
        cores_per_rank=None if processors is None else processors / per_node,
    )
    problems = (
        *beside,
        *map(recipe_problem, recipe.layout_violations(world)),
        *backend_problems(recipe, can, hardware, code),
        *environment_problems(can, environment),
        *(() if layout is None else layout_problems(recipe, can, layout, decided.decisions)),
        *patch_problems(decided.decisions),
        *devices_problems(hardware, per_node),
        *memory_problems(recipe, stages, hardware, per_node),
    )
    return Plan(
        recipe=recipe,
        hardware=hardware,
        target=target,
        nodes=nodes,
        per_node=per_node,
        size=model_size(recipe.architecture, recipe.model),
        peak=can.peak(hardware.devices[0].name) if hardware.devices else None,
        layout=layout,
        memory=stages,
        attention=can.attention(recipe, hardware.generation.value),
        patches=decided,
        environment=environment,
        notes=(*notes, *hardware.notes, *filter(None, own)),
        problems=tuple(sorted(problems, key=lambda problem: _ORDER.index(problem.code))),
    )


def _note_ignored_keys(recipe: Recipe) -> str:
    """Which keys of the model's config a user may take for settings, and the recipe has its own for."""
    names = sorted(name for name in IGNORED if recipe.model.config.get(name))
    if not names:
        return ""
    return (
        f"model.config: {', '.join(names)}: ignored; the head is a language model's, and model.recompute"
        " says what is computed again"
    )


def _delta_nets(recipe: Recipe, can: Capabilities) -> str:
    """What computes gated delta nets where that depends on what ranks can import."""
    if recipe.architecture.delta_net is None or can.backend == "cpu" or not can.delta_nets:
        return ""
    return (
        "gated delta nets: torch alone computes them, slowly, and keeps what is counted; where ranks can"
        " import flash-linear-attention (fla), its kernels do, which nobody has tried here"
    )


def _caution(can: Capabilities, here: Packages | None) -> str:
    """What a device of this backend has met, and in which versions: another one is not covered by them."""
    if can.emulated is None:
        return ""
    from bundle.environment import compatibility  # a table that few plans ask

    package, device, unseen = can.emulated
    table = compatibility.load()
    accepted, emulated = (
        compatibility.versions_met(table, can.backend, package, hardware=real) for real in (True, False)
    )
    said = "; ".join(
        f"accepted on {seen.hardware} with {package} {version} and megatron-core"
        f" {seen.version('megatron-core')}, {seen.date}"
        for version, seen in accepted.items()
    )
    only = f"trained on emulated {device}s only ({package} {', '.join(emulated)})"
    said = said or f"{only}: {unseen} have met no {device}"
    installed = here.package(package) if here else None
    where, versions = "here it is", {installed.version} if installed else set()
    if installed is None:
        where, versions = "images have", {image.version(package) for image in table.images_of(can.backend)}
    others = sorted(version for version in versions if version and version not in (accepted or emulated))
    more = f"; {where} {package} {', '.join(others)}, which has met nothing" if others else ""
    return f"{can.backend}: {said}{more}"


def _mindspeed(recipe: Recipe, can: Capabilities, target: Target) -> str:
    """Which MindSpeed a job goes through, and what of that was ever run."""
    of = mindspeed.made_for(target.version) if recipe.backend_options.mindspeed else None
    if of is None or can.emulated is None:
        return ""
    imports = f"; it imports triton, which {packages.triton_of(can.backend)} brings" * (
        of.imports == "triton"
    )
    fp8 = "; its FP8 was run nowhere" * (recipe.model.fp8 is not None)
    return (
        f"MindSpeed {of.branch} ({of.commit[:12]}) computes linear layers, experts and AdamW, attention and"
        f" norms are ours: it trained on emulated {can.emulated.device}s{imports}{fp8}"
    )


def _triton(can: Capabilities, target: Target, decided: Survey) -> str:
    """Whose triton a megatron-core imports where that is not the one of the same name."""
    brings = packages.triton_of(can.backend)
    imports, said_by = packages.imports_triton(decided.subject.root, target.release)
    if brings == "triton" or not imports:
        return ""
    return (
        f"megatron-core {target.version} imports triton ({said_by}), which {brings} brings to {can.backend}"
    )


def machine(asked: str, backend: str | None, named: str | None) -> tuple[Hardware, tuple[str, ...]]:
    """The hardware to plan for and what is odd about it.

    `asked` is the recipe's backend, `backend` and `named` are the flags --backend and --hardware. A named
    machine wins over the recipe's backend, since the question is then what would happen there. Raises
    UsageError for flags that contradict each other, EnvironmentUnfit where this machine does not have the
    backend.
    """
    if named is None:
        try:
            return detect(backend or asked), ()
        except EnvironmentUnfit as error:
            hint = f"to plan for another machine: --hardware {'|'.join(NAMES)}"
            raise EnvironmentUnfit(f"{error}\n{hint}") from error
    hardware = preset(named)
    notes = [f"for {named}: neither this machine nor the files of the job were looked at"]
    if backend not in (None, "auto", hardware.backend):
        raise UsageError(f"--hardware {named} is a machine for {hardware.backend}, --backend says {backend}")
    if backend is None and asked not in ("auto", hardware.backend):
        notes.append(f"the recipe says backend: {asked}; on {named} the command says otherwise")
    return hardware, tuple(notes)


def _all_devices(recipe: Recipe, hardware: Hardware, nodes: int) -> int:
    """All devices of a node; on the cpu, the fewest ranks that fit the layout."""
    if hardware.backend == "cpu":
        return -(-recipe.parallel.minimal_world // nodes)
    return len(hardware.devices)


def _megatron(
    features: frozenset[str], on: Hardware, mcore: str, allowed: Sequence[str], others: Packages | None
) -> tuple[Target, Survey]:
    """The megatron-core that is named, installed or else the default, and the decisions about it."""
    here, reviewed = packages.detect(), subject.load()
    if mcore:
        of, origin = subject.named(mcore, reviewed), "--mcore"
        _check_minor(of, reviewed)
    else:
        of = subject.installed(here, reviewed)
        origin = f"{of.root}, {of.origin}" if of.root else of.origin
    decided = survey(of, reviewed, others or here, backend=on.backend, features=features, allowed=allowed)
    known = of.version is not None and packages.base_version(of.version) is not None
    unread = "" if known else f"; its version cannot be read, taken for {DEFAULT}"
    return Target(of.version if known and of.version else DEFAULT, origin + unread), decided


def _check_minor(of: Subject, reviewed: Table) -> None:
    """Raises UsageError for a mere version of a minor that nobody has reviewed: there may be none such."""
    known = [minor for reference in reviewed.references if (minor := packages.minor_version(reference))]
    if of.root is None and of.version is not None and packages.minor_version(of.version) not in known:
        first, last = (".".join(map(str, minor)) for minor in (known[0], known[-1]))
        raise UsageError(
            f"--mcore {of.version}: no megatron-core of that number is known, only {first} to {last}; for "
            "another one give the directory of its source"
        )
