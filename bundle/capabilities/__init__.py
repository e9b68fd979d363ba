"""The abilities of an accelerator as data with reasons: layers, kernels, FP8, masks, environment, names.

These are the facts about a backend that are known without torch; `backends` holds the code that needs torch.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from bundle.fp8 import Format, Scaling

if TYPE_CHECKING:
    from bundle.recipe import Recipe  # data about a backend is read without reading recipes

HeadDims = Literal["equal", "v<=qk", "any"]
MaskForm = Literal["none", "valid"]


_CHANGE_ATTENTION_HINT = ". Set another model.attention"


class LayerTraits(NamedTuple):
    """Properties of a backend's layers and optimizer on which tensors and memory depend."""

    fused_norms: bool  # the norm before a projection is part of that projection
    grouped_experts: bool  # one module for the first matrices of all local experts, one for the second
    fused_kernels: bool  # norms, the gate and attention keep only what their own backward kernel reads
    fused_loss: bool  # one kernel, which makes an fp32 copy of the logits, where torch works in place
    adam_counters: bool  # the optimizer keeps a step count with every tensor
    typed_adam: bool  # the optimizer can keep its moments in other types than fp32
    plain_sgd: bool  # SGD without momentum keeps nothing
    source: str
    fp8_copy_bytes: int = 0  # bytes that stay of each weight of an FP8 product, beside the weight
    keeps_scores: bool = False  # attention keeps the probabilities of all pairs of tokens
    # Bytes of each head and pair of tokens of a pack that the backward pass of deterministic attention takes.
    deterministic_workspace: int = 0


class AttentionKernel(NamedTuple):
    """One value of the recipe's `attention`, and its contract."""

    name: str  # flash, fused or unfused
    implementation: str  # the code that runs
    head_dims: dict[str, HeadDims]  # by layout: how the head dims of query-key and value may differ
    source: str
    layouts: tuple[str, ...] = ("thd", "bshd")
    max_head_dim: int | None = None
    masks: tuple[str, ...] = ("causal", "padding_causal", "padding", "no_mask")
    dtypes: tuple[str, ...] = ("bf16",)
    context_parallel: bool = True
    sinks: tuple[str, ...] = ()  # the layouts in which it takes learned sinks; `cp`: between ranks as well
    most_sequences: int | None = None  # in one packed call
    takes_padded_packs: bool = True  # takes packs whose sequences have padding behind them
    # Why a device of this generation takes no such heads: (generation, layout, qk and v head dim).
    explain_device_refusal: Callable[[str, str, int, int], str | None] | None = None

    def compute_max_sequences_per_pack(self, cp: int) -> int | None:
        """Return the number of sequences that a pack may hold on `cp` ranks.

        With several ranks each one calls the kernel with two chunks of every sequence.
        """
        return self.most_sequences and self.most_sequences // (2 if cp > 1 else 1)

    def list_refusals(self, recipe: "Recipe", generation: str | None = None) -> list[str]:
        """Return all reasons why this kernel does not take a job's attention on a device; empty if it does.

        `generation` None: the device is not known, and no reason refers to it.
        """
        width, value_width = recipe.architecture.head_dims
        layout = "thd" if recipe.data.packed else "bshd"
        if layout == "thd" and self.head_dims.get(layout) == "equal":
            value_width = width  # megatron-core pads the values from 0.18, and a patch does before
        reasons = self.list_shape_refusals(
            layout=layout, mask="causal", qk_head_dim=width, v_head_dim=value_width, remedy=""
        )
        remedy = "" if recipe.model.attention == "auto" else _CHANGE_ATTENTION_HINT
        refusals = [f"{reason} (source: {self.source}){remedy}" for reason in reasons]
        if recipe.model.dtype not in self.dtypes:
            offered = ", ".join(self.dtypes)
            refusals.append(f"{self.name} supports only {offered}, but model.dtype is {recipe.model.dtype}")
        if recipe.parallel.cp > 1 and not self.context_parallel:
            refusals.append(
                f"{self.name} does not support context parallelism, but parallel.cp is {recipe.parallel.cp}"
            )
        if layout == "thd" and recipe.parallel.cp > 1 and not self.takes_padded_packs:
            refusals.append(
                f"{self.name} does not support padding between packed sequences, but parallel.cp"
                f" {recipe.parallel.cp} needs it to split sequences into equal parts (source: {self.source})"
            )
        if generation is not None and self.explain_device_refusal is not None:
            device_refusal = self.explain_device_refusal(generation, layout, width, value_width)
            refusals += [f"{self.name} {device_refusal} (source: {self.source})"] if device_refusal else []
        if recipe.architecture.sinks:
            needed_forms = (layout, "cp") if recipe.parallel.cp > 1 else (layout,)
            if missing := [form for form in needed_forms if form not in self.sinks]:
                ways = {"thd": "thd (packs; set data.packed: false)", "cp": "cp (set parallel.cp: 1)"}
                missing_text = " and ".join(ways.get(form, form) for form in missing)
                refusals.append(f"{self.name} does not support learned sinks with {missing_text}")
        return refusals

    def list_shape_refusals(
        self,
        *,
        layout: str,
        mask: str,
        qk_head_dim: int,
        v_head_dim: int,
        remedy: str = _CHANGE_ATTENTION_HINT,
    ) -> tuple[str, ...]:
        """Return all reasons why this kernel does not take such an attention; empty if it does."""
        dims = f"query and key heads of {qk_head_dim} and value heads of {v_head_dim}"
        if layout not in self.layouts:
            return (
                f"{self.name} attention does not support {layout} input, only"
                f" {' and '.join(self.layouts)}{remedy}",
            )
        reasons = []
        if mask not in self.masks:
            reasons.append(
                f"{self.name} attention does not support {mask} masks, only {', '.join(self.masks)}{remedy}"
            )
        rule = self.head_dims[layout]
        if (rule == "equal" and qk_head_dim != v_head_dim) or (rule == "v<=qk" and v_head_dim > qk_head_dim):
            need = "heads of equal size" if rule == "equal" else "value heads no larger than the keys'"
            reasons.append(
                f"{self.name} attention with {layout} input needs {need}, but the model has {dims}{remedy}"
            )
        if self.max_head_dim is not None and max(qk_head_dim, v_head_dim) > self.max_head_dim:
            reasons.append(
                f"{self.name} attention supports head sizes up to {self.max_head_dim}, but the model has"
                f" {dims}{remedy}"
            )
        return tuple(reasons)


class Fp8Scaling(NamedTuple):
    """One FP8 scaling that a backend offers."""

    name: Scaling
    formats: tuple[Format, ...]
    required_device: str  # the device that it takes, in words
    runs_on: Callable[[str], bool]  # of the device's generation (hardware.Device.generation)
    source: str


class Peak(NamedTuple):
    """The highest rates of a device, as its vendor publishes them: of dense matrix products and of memory."""

    device: str  # as its driver names it (hardware.Device.name)
    bf16: float  # FLOP/s
    memory_bandwidth: float  # bytes/s, reads and writes together
    source: str


class SchedulerResource(NamedTuple):
    """The names that schedulers have for a device, unless a cluster has its own name for it."""

    kubernetes: str  # the extended resource, as the vendor's device plugin registers it
    slurm: str  # the option of sbatch that asks for N of them on a node, {} in the place of N
    ray: str  # the resource, as Ray finds it on a machine
    source: str
    generations: frozenset[str] = frozenset()  # of the device; empty: all that no other one names


class EnvVariable(NamedTuple):
    """An environment variable of every rank, and the reason for its value."""

    name: str
    value: str
    reason: str
    features: frozenset[str] = frozenset()  # features of the recipe, all of them
    is_single_node: bool = False  # only where the job has one node
    is_overridable: bool = False  # to a value that is set where the ranks are started
    runs_on: Callable[[str], bool] | None = None  # generations that need it; None: every one


class VariableConflict(NamedTuple):
    """Values that conflict, by a predicate over a rank's environment, and the reason."""

    applies_to: Callable[[Mapping[str, str]], bool]
    reason: str


class ModelInputMask(NamedTuple):
    """The mask that a model gets: none, or valid: bool [b, s] over whole sequences, True = token.

    The masks of post-processing are different ones (sequences.masks.Masks), and so are those of a kernel.
    """

    model: Literal["text", "vlm"]
    layout: Literal["thd", "bshd"]
    form: MaskForm
    reason: str


class KernelChoice(NamedTuple):
    """The kernel that `auto` means, and the reason."""

    value: str
    why: str


class KernelPreference(NamedTuple):
    """A kernel, or `auto` itself, that `auto` means in some jobs on some devices."""

    kernel: str
    applies_to: (
        "Callable[[Recipe, str | None], bool]"  # of the job and the device's generation; None: not known
    )
    reason: str


class DeviceOperator(NamedTuple):
    """An operation that the accelerator's own operator computes, unless a recipe leaves it out."""

    name: str  # in the recipe's `operators`
    implementation: str  # the code that runs
    reason: str
    features: frozenset[str] = frozenset()  # features of a recipe whose jobs have such an operation
    excluded_features: frozenset[str] = frozenset()


class EmulatedTestDevice(NamedTuple):
    """A device that tests emulate; what is known about it holds for the versions of one package."""

    package: str
    device: str  # in words
    untested: str  # what no stand-in shows


class Capabilities(NamedTuple):
    """Everything that the rest of the bundle may know about a backend without torch."""

    backend: str
    device: str  # torch's name of the device type
    collectives: str  # torch.distributed's name of the library
    layers: LayerTraits
    kernels: tuple[AttentionKernel, ...]
    auto_attention: KernelChoice
    fp8: tuple[Fp8Scaling, ...]
    masks: tuple[ModelInputMask, ...]
    environment: tuple[EnvVariable, ...]
    preferences: tuple[KernelPreference, ...] = ()
    resources: tuple[SchedulerResource, ...] = ()  # none where a device is nothing that a scheduler counts
    peaks: tuple[Peak, ...] = ()  # of the devices whose rate somebody read
    operators: tuple[DeviceOperator, ...] = ()
    conflicts: tuple[VariableConflict, ...] = ()
    thread_limit: int = 8  # threads of one rank's own work on the host
    has_delta_nets: bool = True  # gated delta nets, and around them norms whose weights are zero-centred
    no_fp8_reason: str = ""  # why no scaling is offered, where there is none
    emulated_device: EmulatedTestDevice | None = None  # where it was tested on what stands in for the device

    def find_kernel(self, name: str) -> AttentionKernel:
        """Return the attention kernel of that name; for `auto` the kernel that is the default."""
        kernel_name = self.auto_attention.value if name == "auto" else name
        return next(kernel for kernel in self.kernels if kernel.name == kernel_name)

    def choose_attention(self, recipe: "Recipe", generation: str | None) -> KernelChoice:
        """Return the kernel of a job on such a device, which its plan shows and its ranks use.

        `auto` is a preferred kernel, or the only one that takes the job, or else the backend's choice. On
        cuda that choice is `auto` itself. See `list_requested_kernel_refusals` for jobs that no kernel takes.
        """
        if recipe.model.attention != "auto":
            return KernelChoice(recipe.model.attention, "chosen in the recipe")
        fitting_kernels = [
            kernel.name for kernel in self.kernels if not kernel.list_refusals(recipe, generation)
        ]
        for preferred in self.preferences:
            if preferred.kernel in ("auto", *fitting_kernels) and preferred.applies_to(recipe, generation):
                return KernelChoice(preferred.kernel, preferred.reason)
        return (
            KernelChoice(fitting_kernels[0], "the only kernel that supports this job")
            if len(fitting_kernels) == 1
            else self.auto_attention
        )

    def choose_layer_traits(self, recipe: "Recipe", generation: str | None) -> LayerTraits:
        """Return the traits of the layers that this job gets on such a device, by its attention kernel."""
        unfused = self.choose_attention(recipe, generation).value == "unfused"
        return self.layers._replace(
            keeps_scores=unfused and self.layers.fused_kernels,
            fused_loss=self.layers.fused_loss and not recipe.train.deterministic,
        )

    def list_requested_kernel_refusals(self, recipe: "Recipe", generation: str | None) -> list[str]:
        """Return why the requested kernel does not take this job; with `auto`, why none of them does."""
        kernel_name = recipe.model.attention
        candidates = [kernel for kernel in self.kernels if kernel_name in ("auto", kernel.name)]
        if not candidates:
            offered = ", ".join(kernel.name for kernel in self.kernels)
            return [f"{self.backend} has no {kernel_name} kernel, only {offered}"]
        refusals = [kernel.list_refusals(recipe, generation) for kernel in candidates]
        return [reason for reasons in refusals for reason in reasons] if all(refusals) else []

    def uses_operator(self, recipe: "Recipe", name: str) -> bool:
        """Return whether the accelerator's own operator computes an operation of this job."""
        requested = recipe.model.operators
        is_available = name in [available.name for available in self.list_applicable_operators(recipe)]
        return is_available and (requested is None or name in requested)

    def list_applicable_operators(self, recipe: "Recipe") -> list[DeviceOperator]:
        """Return the operators for operations of this job, those that the recipe leaves out too."""
        features = recipe.features
        return [
            operator
            for operator in self.operators
            if operator.features <= features and not operator.excluded_features & features
        ]

    def list_operator_refusals(self, recipe: "Recipe") -> list[str]:
        """Return a refusal for each requested operator that this backend does not have."""
        offered = [operator.name for operator in self.operators]
        has = f"Choose from {', '.join(offered)}" if offered else "Leave the key out"
        unknown = [name for name in recipe.model.operators or () if name not in offered]
        return [f"{self.backend} has no operator {name}. {has}" for name in unknown]

    def find_mask(self, model: str, layout: str) -> ModelInputMask:
        """Return the mask that a model of this kind takes in this layout."""
        return next(mask for mask in self.masks if (mask.model, mask.layout) == (model, layout))

    def explain_fp8_refusal(self, scaling: Scaling, format: Format, generation: str | None) -> str | None:
        """Return why this FP8 is not available; None if it is. `generation` None: the device is unknown."""
        offered = {option.name: option for option in self.fp8}
        option = offered.get(scaling)
        if not offered:
            return f"{self.backend} {self.no_fp8_reason}"
        if option is None:
            return f"{self.backend} does not support {scaling} FP8 scaling, only {', '.join(offered)}"
        if format not in option.formats:
            return f"{scaling} FP8 does not support the format {format}, only {', '.join(option.formats)}"
        if generation is not None and not option.runs_on(generation):
            return (
                f"{scaling} FP8 needs {option.required_device}, but this device is {generation}"
                f" ({option.source})"
            )
        return None

    def find_bf16_peak(self, device: str) -> Peak | None:
        """Return the highest rate of the device of that name; None where nobody read it."""
        return next((peak for peak in self.peaks if peak.device == device), None)

    def find_resource(self, generation: str) -> SchedulerResource | None:
        """Return the schedulers' names of a device of this generation; None if schedulers do not count it.

        `generation` is "" where it is unknown.
        """
        matches = (resource for resource in self.resources if generation in resource.generations)
        return next(
            matches, next((resource for resource in self.resources if not resource.generations), None)
        )

    def list_variables(
        self,
        features: frozenset[str],
        nodes: int = 1,
        overrides: Mapping[str, str | None] | None = None,
        *,
        generation: str | None = None,
        cores_per_rank: float | None = None,
    ) -> tuple[EnvVariable, ...]:
        """Return the environment of a rank of a job with these features.

        If the job needs two values of one variable, the later one in the table counts. `generation` and
        `cores_per_rank` are None where the device or the node is unknown. `overrides` are the values of the
        recipe's `environment`, which replace those of the table; None leaves a variable out.
        """
        table = (*self.environment, self._choose_threads(cores_per_rank), *COMMON_RANK_ENVIRONMENT)
        needed = [v for v in table if v.features <= features and (nodes == 1 or not v.is_single_node)]
        by_name = {v.name: v for v in needed if not (v.runs_on and generation) or v.runs_on(generation)}
        for name, value in (overrides or {}).items():
            replaced = by_name.pop(name, None)
            if value is not None:
                instead = f", instead of {replaced.value!r} ({replaced.reason})" if replaced else ""
                by_name[name] = EnvVariable(name, value, f"chosen in the recipe{instead}")
        return tuple(by_name.values())

    def _choose_threads(self, cores_per_rank: float | None) -> EnvVariable:
        """Return the variable with the number of threads of a rank's own work on the host."""
        limit = self.thread_limit
        if limit == 1:
            reason = "ranks share the node's cores; a fixed number keeps sums equal on every machine"
            return EnvVariable("OMP_NUM_THREADS", "1", reason, is_overridable=True)
        known = "unknown, so the limit applies" if cores_per_rank is None else f"{cores_per_rank:.4g}"
        threads = limit if cores_per_rank is None else max(1, min(limit, int(cores_per_rank)))
        reason = (
            f"one thread per core, at most {limit}. The cores per rank: {known}. On an H200, a step of the"
            " MoE benchmark took 456 ms with 1 thread and 421 ms without this variable"
        )
        return EnvVariable("OMP_NUM_THREADS", str(threads), reason, is_overridable=True)

    def list_conflicts(self, environment: Mapping[str, str]) -> list[str]:
        """Return the reasons why values of such an environment conflict."""
        return [conflict.reason for conflict in self.conflicts if conflict.applies_to(environment)]


# Variables of ranks on every backend.
COMMON_RANK_ENVIRONMENT = (
    EnvVariable(
        "GLOO_SOCKET_IFNAME",
        "lo",
        "nothing outside needs to reach a job on one node",
        is_single_node=True,
        is_overridable=True,
    ),
)


CONNECTIONS_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"  # megatron reads it on every device


def find_capabilities(backend: str, features: frozenset[str] = frozenset()) -> Capabilities:
    """Return what a backend (cpu, cuda, ascend) offers to a job with these features."""
    from bundle.capabilities.ascend import ASCEND, ASCEND_WITH_MINDSPEED
    from bundle.capabilities.cpu import CPU
    from bundle.capabilities.cuda import CUDA

    ascend = ASCEND_WITH_MINDSPEED if "mindspeed" in features else ASCEND
    return next(candidate for candidate in (CPU, CUDA, ascend) if candidate.backend == backend)
