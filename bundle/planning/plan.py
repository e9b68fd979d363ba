"""The plan of a job on a machine with a megatron-core, and every problem that stops it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from packaging.version import Version

from bundle import capabilities
from bundle.architectures.config import IGNORED_KEYS_TO_REPORT
from bundle.capabilities import Capabilities, EnvVariable, KernelChoice, Peak
from bundle.environment import packages
from bundle.environment.hardware import PRESET_NAMES, build_preset, detect
from bundle.environment.machine import Hardware
from bundle.environment.packages import MegatronCode, Packages
from bundle.errors import BundleError, EnvironmentUnfit, ExitCode, PatchError, UsageError
from bundle.patches import megatron_core, mindspeed
from bundle.patches.megatron_core import DEFAULT_RELEASE, MegatronCore, ReviewTable
from bundle.patches.plan import Survey, survey_patches
from bundle.planning.layout import RankLayout, build_rank_layout, can_lay_out
from bundle.planning.memory import (
    MemoryEstimate,
    describe_tight_memory,
    estimate_memory,
    find_device_or_host_memory,
)
from bundle.planning.micro_batch import SizeChooser
from bundle.planning.problems import (
    Problem,
    find_backend_problems,
    find_device_problems,
    find_layout_problems,
    find_memory_problems,
    find_mindspeed_problems,
    find_open_file_problems,
    find_patch_problems,
    find_rank_environment_conflicts,
    to_recipe_problem,
)
from bundle.planning.roofline import Roofline
from bundle.planning.server_memory import (
    DeviceShare,
    add_kv_cache,
    compute_device_share,
    find_ipc_transport_problems,
)
from bundle.planning.size import ParametersAndForwardFlops, compute_model_size
from bundle.recipe import Recipe

if TYPE_CHECKING:
    from bundle.patches.plan import PatchPlan

# The gravest first: a recipe has to be changed before a machine is worth looking for.
_ERROR_BY_CODE: dict[ExitCode, type[BundleError]] = {
    ExitCode.USAGE: UsageError,
    ExitCode.ENVIRONMENT_UNFIT: EnvironmentUnfit,
    ExitCode.PATCHES: PatchError,
}
_CODE_ORDER = tuple(_ERROR_BY_CODE)


class MegatronVersion(NamedTuple):
    """The megatron-core that is planned for: its version, and where that was read."""

    version: str
    origin: str

    @property
    def release(self) -> Version:
        """The release number alone, by which releases are compared."""
        return Version(Version(self.version).base_version)


class Plan(NamedTuple):
    """Everything that is decided about a job; `layout` is None, and `memory` empty, without a layout."""

    recipe: Recipe
    hardware: Hardware
    megatron: MegatronVersion
    nodes: int
    per_node: int
    size: ParametersAndForwardFlops
    peak: Peak | None  # of a device, where it is known
    layout: RankLayout | None
    memory: tuple[MemoryEstimate, ...]  # of every pipeline stage
    device_share: DeviceShare | None  # of a server that stands on the trainer's devices
    attention: KernelChoice
    patches: Survey
    environment: tuple[EnvVariable, ...]
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]
    weights: str = ""  # what the model begins with; "": not looked at, or not to be loaded
    allow_drift: tuple[str, ...] = ()  # patches that drifted, and do not stop it

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.nodes * self.per_node

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of a command that was asked to run this plan."""
        codes = {problem.code for problem in self.problems}
        return next((code for code in _CODE_ORDER if code in codes), ExitCode.OK)

    @property
    def fullest_rank_bytes(self) -> int:
        """The bytes of the rank that needs the most; 0 without a layout."""
        return max((stage.peak_bytes for stage in self.memory), default=0)

    @property
    def roofline(self) -> Roofline:
        """The prediction of a step's time on these devices."""
        can = capabilities.find_capabilities(self.hardware.backend, self.recipe.features)
        traits = can.choose_layer_traits(self.recipe, self.hardware.oldest_generation.value)
        code = MegatronCode(self.megatron.release, self.patches.core.root)
        return Roofline(traits, code, self.peak, self.per_node)

    @property
    def step_tokens(self) -> int:
        """The largest number of tokens of a step: samples may be shorter, and packs may not be full."""
        return self.recipe.train.global_batch_size * self.recipe.data.sequence_length

    @property
    def step_flops(self) -> int:
        """FLOPs of a step with `step_tokens` tokens, if every sample is one sequence (see `size`)."""
        sample_flops = self.size.count_training_flops([self.recipe.data.sequence_length])
        return self.recipe.train.global_batch_size * sample_flops

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint, over all ranks."""
        return self.size.count_checkpoint_bytes(self.recipe.model.dtype, self.recipe.optimizer)

    @property
    def export_bytes(self) -> int:
        """Bytes of one export at most; 0 where the recipe has no export."""
        return self.size.count_export_bytes(self.recipe.model.dtype, self.recipe.checkpoint.export)

    @property
    def environment_variables(self) -> dict[str, str]:
        """The environment that ranks are started with."""
        return {variable.name: variable.value for variable in self.environment}

    @property
    def patch_plan(self) -> "PatchPlan":
        """The patches of the target, which must have a source tree. Raise PatchError without one."""
        # A plan alone does not read megatron's sources: that takes as long as all the rest.
        from bundle.patches.plan import build_patch_plan

        return build_patch_plan(self.patches)

    def raise_gravest_problem(self) -> None:
        """Raise the error of the gravest problem; see the function `refuse`."""
        raise_gravest_problem(self.recipe, self.problems)


def raise_gravest_problem(recipe: Recipe, problems: Sequence[Problem]) -> None:
    """Raise the gravest problem's error with all problems in it; do nothing where there is none."""
    for code, error in _ERROR_BY_CODE.items():
        if any(problem.code is code for problem in problems):
            raise error(f"recipe {recipe.name} cannot run here", [problem.text for problem in problems])


def with_kernel(features: frozenset[str], attention: str) -> frozenset[str]:
    """Return a job's features with the attention kernel that it gets."""
    return features - {"attention-auto"} | {f"attention-{attention}"}


def build_plan(
    recipe: Recipe,
    *,
    backend: str | None = None,
    hardware_name: str | None = None,
    mcore: str = "",
    allow_drift: Sequence[str] = (),
    nodes: int | None = None,
    per_node: int | None = None,
    extra_problems: Sequence[Problem] = (),
    weights: str = "",
    other_packages: Packages | None = None,
) -> Plan:
    """Return the plan of a recipe; arguments that are None come from the recipe and from this machine.

    `hardware_name` is a machine to plan for instead of this one. `mcore` is a version or a tree instead of
    the installed megatron-core. `other_packages` are the packages of another place. `extra_problems` and
    `weights` (the description of the first weights) were found elsewhere. Raise UsageError and
    EnvironmentUnfit where a plan is not possible.
    """
    hardware, notes = choose_hardware(recipe.backend, backend, hardware_name)
    can = capabilities.find_capabilities(hardware.backend, recipe.features)
    kernel = can.choose_attention(recipe, hardware.oldest_generation.value).value
    features = with_kernel(recipe.features, kernel)
    megatron, patch_survey = _resolve_and_survey_megatron(
        features, hardware, mcore, allow_drift, other_packages
    )
    code = MegatronCode(megatron.release, patch_survey.core.root)
    target_packages = other_packages or (packages.detect() if hardware_name is None else None)
    plan = assemble_plan(
        recipe,
        hardware,
        megatron,
        patch_survey,
        nodes=nodes,
        per_node=per_node,
        notes=notes,
        extra_problems=(*extra_problems, *find_mindspeed_problems(recipe, can, code, target_packages)),
        installed=other_packages or packages.detect(),
    )
    return plan._replace(weights=weights, allow_drift=tuple(allow_drift))


def assemble_plan(
    recipe: Recipe,
    hardware: Hardware,
    megatron: MegatronVersion,
    patch_survey: Survey,
    *,
    nodes: int | None = None,
    per_node: int | None = None,
    notes: Sequence[str] = (),
    extra_problems: Sequence[Problem] = (),
    installed: Packages | None = None,
) -> Plan:
    """Return the plan for a machine and a megatron-core that are known, with every problem in it.

    `nodes` and `per_node` override the recipe. `extra_problems` were found elsewhere. `installed` are the
    packages of the machine, where they are known.
    """
    can = capabilities.find_capabilities(hardware.backend, recipe.features)
    code = MegatronCode(megatron.release, patch_survey.core.root)
    nodes = nodes or recipe.devices.nodes
    per_node = per_node or recipe.devices.per_node or _count_devices_per_node(recipe, hardware, nodes)
    world = nodes * per_node
    layout = build_rank_layout(recipe, world) if can_lay_out(recipe, world) else None
    traits = can.choose_layer_traits(recipe, hardware.oldest_generation.value)
    device = hardware.smallest_device_memory
    peak = can.find_bf16_peak(hardware.devices[0].name) if hardware.devices else None
    roofline = Roofline(traits, code, peak, per_node)
    chooser, size_note = (
        SizeChooser(roofline, traits, code, find_device_or_host_memory(hardware, per_node)),
        None,
    )
    if layout is not None and recipe.train.micro_batch_size == "auto":
        if not recipe.find_layout_violations(world):
            (_, recipe, layout), size_note = chooser.choose_fastest(recipe, layout)
    elif layout is not None and peak is not None:
        size_note = chooser.advise(recipe, layout)
    stages = () if layout is None else estimate_memory(recipe, layout, traits, code)
    device_share = None if recipe.rl is None else compute_device_share(recipe, stages, device.value)
    stages = add_kv_cache(stages, device_share)
    extra_notes = (
        describe_tight_memory(stages, device),
        size_note,
        _describe_tested_versions(can, installed),
        _describe_triton_provider(can, megatron, patch_survey),
        _describe_mindspeed_branch(recipe, can, megatron),
        _describe_delta_nets(recipe, can),
        _describe_ignored_config_keys(recipe),
    )
    processors = hardware.host.processors.value
    environment = can.list_variables(
        recipe.features,
        nodes,
        recipe.environment,
        generation=hardware.oldest_generation.value,
        cores_per_rank=None if processors is None else processors / per_node,
    )
    problems = (
        *extra_problems,
        *map(to_recipe_problem, recipe.find_layout_violations(world)),
        *find_backend_problems(recipe, can, hardware, code),
        *find_rank_environment_conflicts(can, environment),
        *(() if layout is None else find_layout_problems(recipe, can, layout, patch_survey.decisions)),
        *find_patch_problems(patch_survey.decisions),
        *find_device_problems(hardware, per_node),
        *find_open_file_problems(hardware, nodes, per_node),
        *find_memory_problems(recipe, stages, hardware, per_node),
        *(() if device_share is None else device_share.find_problems()),
        *(() if recipe.rl is None else find_ipc_transport_problems(recipe, can.backend, environment)),
    )
    return Plan(
        recipe=recipe,
        hardware=hardware,
        megatron=megatron,
        nodes=nodes,
        per_node=per_node,
        size=compute_model_size(recipe.architecture, recipe.model),
        peak=peak,
        layout=layout,
        memory=stages,
        device_share=device_share,
        attention=can.choose_attention(recipe, hardware.oldest_generation.value),
        patches=patch_survey,
        environment=environment,
        notes=(*notes, *hardware.notes, *filter(None, extra_notes)),
        problems=tuple(sorted(problems, key=lambda problem: _CODE_ORDER.index(problem.code))),
    )


def _describe_ignored_config_keys(recipe: Recipe) -> str:
    """Return a note about ignored keys of the model's config that look like settings; "" for none.

    The recipe has its own keys for them.
    """
    names = sorted(name for name in IGNORED_KEYS_TO_REPORT if recipe.model.config.get(name))
    if not names:
        return ""
    return (
        f"model.config: {', '.join(names)} ignored: only the language model head is trained, and"
        " model.recompute sets what is recomputed"
    )


def _describe_delta_nets(recipe: Recipe, can: Capabilities) -> str:
    """Return a note about the code that computes gated delta nets, where it depends on the packages.

    The packages are those that ranks can import.
    """
    if recipe.architecture.delta_net is None or can.backend == "cpu" or not can.has_delta_nets:
        return ""
    return (
        "gated delta nets: torch computes them slowly, and the memory estimate assumes torch. Ranks that"
        " can import flash-linear-attention (fla) use its kernels, which are untested here"
    )


def _describe_tested_versions(can: Capabilities, installed_packages: Packages | None) -> str:
    """Return a note about the runs on this backend's devices and the versions of these runs.

    The runs do not cover other versions.
    """
    if can.emulated_device is None:
        return ""
    from bundle.environment import compatibility  # a table that few plans ask

    package, device, untested_parts = can.emulated_device
    table = compatibility.load()
    accepted_versions, emulated_versions = (
        compatibility.list_tested_versions(table, can.backend, package, hardware=real)
        for real in (True, False)
    )
    experience = "; ".join(
        f"accepted on {record.device_name_unless_emulated} with {package} {version} and megatron-core"
        f" {record.get_version('megatron-core')}, {record.date}"
        for version, record in accepted_versions.items()
    )
    emulated_text = f"trained on emulated {device}s only ({package} {', '.join(emulated_versions)})"
    experience = experience or f"{emulated_text}: {untested_parts} were never tested on a real {device}"
    installed = installed_packages.find_package(package) if installed_packages else None
    where_text, versions = "installed is", {installed.version} if installed else set()
    if installed is None:
        where_text, versions = (
            "images have",
            {image.get_version(package) for image in table.list_images(can.backend)},
        )
    untested_versions = sorted(
        version for version in versions if version and version not in (accepted_versions or emulated_versions)
    )
    more = (
        f"; {where_text} {package} {', '.join(untested_versions)}, which was never tested"
        if untested_versions
        else ""
    )
    return f"{can.backend}: {experience}{more}"


def _describe_mindspeed_branch(recipe: Recipe, can: Capabilities, megatron: MegatronVersion) -> str:
    """Return a note about the MindSpeed that a job uses, and about which parts of it were ever run."""
    branch = (
        mindspeed.find_branch_by_megatron_version(megatron.version)
        if recipe.backend_options.mindspeed
        else None
    )
    if branch is None or can.emulated_device is None:
        return ""
    imports = f"; it imports triton, which comes with {packages.get_triton_distribution(can.backend)}" * (
        branch.imports == "triton"
    )
    fp8 = "; its FP8 was never run" * (recipe.model.fp8 is not None)
    return (
        f"MindSpeed {branch.branch} ({branch.commit[:12]}) computes linear layers, experts and AdamW;"
        " mcore-bundle computes attention and norms. This MindSpeed was tested only on emulated"
        f" {can.emulated_device.device}s{imports}{fp8}"
    )


def _describe_triton_provider(can: Capabilities, megatron: MegatronVersion, patch_survey: Survey) -> str:
    """Return a note about the triton that a megatron-core imports, where another package provides it."""
    brings = packages.get_triton_distribution(can.backend)
    imports, evidence = packages.detect_megatron_triton_import(patch_survey.core.root, megatron.release)
    if brings == "triton" or not imports:
        return ""
    return (
        f"megatron-core {megatron.version} imports triton ({evidence}), which comes with {brings} on"
        f" {can.backend}"
    )


def choose_hardware(
    recipe_backend: str, backend: str | None, hardware_name: str | None
) -> tuple[Hardware, tuple[str, ...]]:
    """Return the hardware to plan for, and notes about it.

    `recipe_backend` is the recipe's backend, `backend` and `hardware_name` are the flags --backend and
    --hardware. A named machine wins over the recipe's backend, because the plan is then for that machine.
    Raise UsageError for flags that contradict each other, EnvironmentUnfit where this machine does not have
    the backend.
    """
    if hardware_name is None:
        try:
            return detect(backend or recipe_backend), ()
        except EnvironmentUnfit as error:
            hint = f"To plan for another machine, use --hardware {'|'.join(PRESET_NAMES)}"
            raise EnvironmentUnfit(f"{error}\n{hint}") from error
    hardware = build_preset(hardware_name)
    notes = [f"planned for {hardware_name}: this machine and the files of the job were not checked"]
    if backend not in (None, "auto", hardware.backend):
        raise UsageError(
            f"--hardware {hardware_name} is a machine for {hardware.backend}, but --backend is {backend}."
            " Leave one of them out"
        )
    if backend is None and recipe_backend not in ("auto", hardware.backend):
        notes.append(
            f"--hardware {hardware_name} uses backend {hardware.backend}. The recipe's backend"
            f" {recipe_backend} is ignored"
        )
    return hardware, tuple(notes)


def _count_devices_per_node(recipe: Recipe, hardware: Hardware, nodes: int) -> int:
    """Return the number of devices of a node; on the cpu, the fewest ranks that fit the layout."""
    if hardware.backend == "cpu":
        return -(-recipe.parallel.minimal_world // nodes)
    return len(hardware.devices)


def _resolve_and_survey_megatron(
    features: frozenset[str],
    hardware: Hardware,
    mcore: str,
    allowed_drift: Sequence[str],
    other_packages: Packages | None,
) -> tuple[MegatronVersion, Survey]:
    """Return the megatron-core that is named, installed or else the default, and the decisions about it."""
    local_packages, review_table = packages.detect(), megatron_core.load_review_table()
    if mcore:
        megatron_subject, origin = megatron_core.resolve_core_path_or_version(mcore, review_table), "--mcore"
        _check_sourceless_minor_version(megatron_subject, review_table)
    else:
        megatron_subject = megatron_core.find_installed_or_default_core(local_packages, review_table)
        origin = (
            f"{megatron_subject.root}, {megatron_subject.origin}"
            if megatron_subject.root
            else megatron_subject.origin
        )
    patch_survey = survey_patches(
        megatron_subject,
        review_table,
        other_packages or local_packages,
        backend=hardware.backend,
        features=features,
        allowed=allowed_drift,
    )
    is_known = (
        megatron_subject.version is not None
        and packages.parse_base_version(megatron_subject.version) is not None
    )
    unread_note = "" if is_known else f"; its version cannot be read, so {DEFAULT_RELEASE} is assumed"
    return MegatronVersion(
        megatron_subject.version if is_known and megatron_subject.version else DEFAULT_RELEASE,
        origin + unread_note,
    ), patch_survey


def _check_sourceless_minor_version(megatron_subject: MegatronCore, review_table: ReviewTable) -> None:
    """Raise UsageError for a version without a source tree whose minor nobody reviewed: it may not exist."""
    known_minors = [
        minor for reference in review_table.references if (minor := packages.parse_minor_version(reference))
    ]
    if (
        megatron_subject.root is None
        and megatron_subject.version is not None
        and packages.parse_minor_version(megatron_subject.version) not in known_minors
    ):
        first, last = (".".join(map(str, minor)) for minor in (known_minors[0], known_minors[-1]))
        raise UsageError(
            f"--mcore {megatron_subject.version}: not a known megatron-core version (known: {first} to"
            f" {last}). For another one, give the directory of its source"
        )
