"""Builds a recipe from a task, a model and a data file; each open value is chosen here with a reason."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bundle.architectures import Architecture
from bundle.cli.request import JobRequest, Machines, plan_job
from bundle.errors import ExitCode, UsageError
from bundle.launch import Start
from bundle.planning.inputs import find_input_output_problems
from bundle.planning.plan import choose_hardware, raise_gravest_problem
from bundle.recipe import Recipe, flatten, from_mapping
from bundle.recipe.completion import list_shown_settings
from bundle.recipe.tasks import TASKS
from bundle.runs.directory import RunDirectory

if TYPE_CHECKING:
    from bundle.data import Corpus

# SFT: the default of transformers' TrainingArguments and of ms-swift. DPO: as for Zephyr and Tulu 3.
DEFAULT_EPOCHS_BY_TASK = {"sft": 3.0, "dpo": 1.0, "pretrain": 1.0}
SHORTEST_SEQUENCE_LENGTH = 64
TARGET_PACK_LENGTH = 8192  # the pack length of the ready jobs (`recipes list`)
MAX_PRETRAIN_LENGTH = 4096  # the length of the first stage of Qwen3's and OLMo 2's pre-training
LARGEST_BATCH = 64
TARGET_MIN_EPOCH_STEPS = 32  # the least steps of an epoch, where the data has as many samples
MIN_STEP_SAMPLES_TO_LENGTHEN = 16  # samples of a step; with more, samples become longer


class KeyChoice(NamedTuple):
    """One key of a recipe, its value, and the reason for it."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class TaskSpec:
    """The values that a user gives instead of a recipe."""

    task: str
    model: str
    data: Sequence[str]
    lora: bool = False
    epochs: float | None = None
    hardware: str = ""  # instead of this machine
    request: JobRequest = field(default_factory=JobRequest)

    @property
    def run_name(self) -> str:
        """The recipe's name: that of the run directory, if given, or else made of task and model."""
        output, suffix = self.request.run_directory, "-lora" if self.lora else ""
        text = output.absolute().name if output else f"{self.task}{suffix}-{Path(self.model).absolute().name}"
        return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).lstrip("._-")[:63] or self.task

    @property
    def overridden_keys(self) -> list[str]:
        """The keys that the user sets."""
        return [override.partition("=")[0].strip() for override in self.request.overrides or ()]

    def leaves_open(self, key: str) -> bool:
        """Return whether the user sets neither this key nor a section that contains it."""
        return not any(key == name or key.startswith(f"{name}.") for name in self.overridden_keys)


class BuiltRecipe(NamedTuple):
    """A recipe, its choices that are not defaults, and its data."""

    recipe: Recipe
    choices: tuple[KeyChoice, ...]
    corpus: "Corpus"


def build_recipe(spec: TaskSpec) -> BuiltRecipe:
    """Return the recipe for a task, from the model's config, the data's lengths and this machine's devices.

    Where no layout fits, the recipe has the last one, and its plan has the problems. Raise UsageError for
    missing inputs, and JobFailed for corrupt rows and rows longer than the model's positions.
    """
    spec_choices = _choose_from_spec(spec)
    draft = _compose_recipe_first_wins(
        spec, spec_choices, _build_data_dependent_placeholders(SHORTEST_SEQUENCE_LENGTH)
    )
    if not TASKS[spec.task].has_plain_text_rows:
        positions = draft.architecture.max_position_embeddings
        draft = _compose_recipe_first_wins(
            spec,
            spec_choices,
            _build_data_dependent_placeholders(_compute_required_sample_length(positions, draft)),
        )
    length_choices = [*spec_choices, _choose_length(draft, _read_data(draft, spec.request))]
    corpus = _read_data(
        _compose_recipe_first_wins(
            spec, length_choices, _build_data_dependent_placeholders(SHORTEST_SEQUENCE_LENGTH)
        ),
        spec.request,
    )
    request = spec.request
    devices = request.devices_per_node or draft.devices.per_node
    if devices is None:
        hardware, _ = choose_hardware(draft.backend, request.backend or None, spec.hardware or None)
        devices = len(hardware.devices) or 1
    for layout in _propose_layouts(spec, draft.architecture, devices):
        try:
            recipe = _compose_recipe_first_wins(
                spec, length_choices, layout, _build_data_dependent_placeholders(SHORTEST_SEQUENCE_LENGTH)
            )
        except UsageError:
            if not layout:
                raise
            continue  # these sizes do not divide the model
        choices = [*length_choices, _choose_batch_size(recipe, len(corpus.training), devices), *layout]
        recipe = _compose_recipe_first_wins(spec, choices)
        plan = plan_job(recipe, request, Machines(hardware=spec.hardware)).plan
        if plan.exit_code is not ExitCode.ENVIRONMENT_UNFIT:
            break
    return BuiltRecipe(recipe, tuple(_add_overrides_and_defaults(spec, recipe, choices)), corpus)


def _add_overrides_and_defaults(
    spec: TaskSpec, recipe: Recipe, choices: Sequence[KeyChoice]
) -> Iterator[KeyChoice]:
    """Yield the choices made here, the keys that the user sets, and the defaults that decide the training."""
    by_key = {choice.key: choice for choice in choices if spec.leaves_open(choice.key)}
    values = dict(flatten(recipe.dump()))
    for name in dict.fromkeys(spec.overridden_keys):
        keys = (key for key in values if key == name or key.startswith(f"{name}."))
        by_key |= {key: KeyChoice(key, values[key], "--set") for key in keys}
    for setting in list_shown_settings(recipe.dump(), recipe.origins):
        by_key.setdefault(setting.key, KeyChoice(*setting))
    # A chosen section, like model.lora, is listed by its keys.
    sections = {key.rpartition(".")[0] for key in by_key}
    yield from (choice for key, choice in by_key.items() if key not in sections)


def _choose_from_spec(spec: TaskSpec) -> list[KeyChoice]:
    """Return the choices in the user's values, and those that follow from the task alone."""
    epochs = DEFAULT_EPOCHS_BY_TASK[spec.task] if spec.epochs is None else spec.epochs
    choices = [
        KeyChoice("name", spec.run_name, "names the run directory"),
        KeyChoice("task", spec.task, "the kind of training"),
        KeyChoice("model.path", spec.model, "--model"),
        KeyChoice("data.path", list(spec.data), "--data"),
        KeyChoice("checkpoint.export", "hf", "a complete model, which transformers opens"),
    ]
    if not TASKS[spec.task].has_plain_text_rows:
        choices.append(KeyChoice("model.weights", "load", "fine-tuning needs trained weights"))
    if spec.lora:
        choices.append(KeyChoice("model.lora", {}, "--lora"))
    if spec.leaves_open("train.steps") and spec.leaves_open("train.samples"):
        reason = f"the default of {spec.task}" if spec.epochs is None else "--epochs"
        choices.append(KeyChoice("train.epochs", epochs, reason))
    return choices


def _build_data_dependent_placeholders(length: int) -> list[KeyChoice]:
    """Return placeholders for the choices that depend on the data, enough to read the data."""
    return [KeyChoice("data.sequence_length", length, ""), KeyChoice("train.global_batch_size", 1, "")]


def _compose_recipe_first_wins(spec: TaskSpec, *choices: Sequence[KeyChoice]) -> Recipe:
    """Return the recipe of these choices; the user's values count first, then the first choice of a key."""
    values: dict[str, Any] = {}
    for choice in (choice for group in choices for choice in group if spec.leaves_open(choice.key)):
        *sections, last = choice.key.split(".")
        node = values
        for section in sections:
            node = node.setdefault(section, {})
        node.setdefault(last, choice.value)
    return from_mapping(values, f"recipe {spec.run_name}", spec.request.overrides or ())


def _read_data(recipe: Recipe, request: JobRequest) -> "Corpus":
    """Return the data of a recipe as tokens. Raise for inputs that cannot be used."""
    directory = request.find_run_directory(recipe)
    run = RunDirectory(directory)
    # The recipe is not complete yet, so it cannot be compared with that of an earlier run there.
    run_problems = run.find_problems(recipe, Start(fresh=True))
    initial_weights = run.find_initial_weights(recipe, request.build_start())
    raise_gravest_problem(
        recipe, [*find_input_output_problems(recipe, directory, initial_weights), *run_problems]
    )
    from bundle.data import prepare
    from bundle.data.cache import choose_cross_run_cache_directory
    from bundle.data.loader import build_progress_callback

    return prepare(recipe, choose_cross_run_cache_directory(recipe, directory), build_progress_callback())


def _compute_required_sample_length(document_length: int, recipe: Recipe) -> int:
    """Return the length of a sample that holds a document of this length and its companions [tokens]."""
    if not recipe.data.packed:
        return document_length
    multiple = recipe.alignment.sequence_multiple * 16
    return -(-document_length // multiple) * multiple * recipe.documents_per_sample


def _choose_length(recipe: Recipe, corpus: "Corpus") -> KeyChoice:
    """Return the length of samples [tokens]: the longest row, or a length that gives enough samples of text.

    Packs are longer where the data fills enough of them, as a device then computes more at once.
    """
    key, positions = "data.sequence_length", recipe.architecture.max_position_embeddings
    if is_text := recipe.task_traits.has_plain_text_rows:
        length, max_length = SHORTEST_SEQUENCE_LENGTH, min(MAX_PRETRAIN_LENGTH, positions)
        reason = f"the data has {corpus.tokens:,} tokens, the model {positions:,} positions"
    else:
        longest = max(int(store.lengths.max(initial=0)) for store in corpus.stores)
        length, max_length = (
            1
            << (
                max(SHORTEST_SEQUENCE_LENGTH, _compute_required_sample_length(longest, recipe)) - 1
            ).bit_length(),
            TARGET_PACK_LENGTH,
        )
        reason = f"holds the longest row ({longest:,} tokens)"
    if is_text or recipe.data.packed:
        while (
            2 * length <= max_length
            and corpus.tokens >= 2 * length * TARGET_MIN_EPOCH_STEPS * MIN_STEP_SAMPLES_TO_LENGTHEN
        ):
            length *= 2
    return KeyChoice(key, length if recipe.data.packed else min(length, positions), reason)


def _choose_batch_size(recipe: Recipe, samples: int, devices: int) -> KeyChoice:
    """Return the samples of a step: a power of two that leaves an epoch enough steps.

    It is rounded up to a multiple for every replica.
    """
    batch = 1
    while 2 * batch <= LARGEST_BATCH and samples >= 2 * batch * TARGET_MIN_EPOCH_STEPS:
        batch *= 2
    multiple = recipe.train.micro_batch_size_or_one
    multiple *= (
        recipe.parallel.compute_dp(devices) if recipe.parallel.is_minimal_world_multiple(devices) else 1
    )
    batch = -(-batch // multiple) * multiple
    reason = f"steps in an epoch of {samples:,} samples: {-(-samples // batch):,}"
    return KeyChoice("train.global_batch_size", batch, reason)


def _propose_layouts(
    spec: TaskSpec, architecture: Architecture, devices: int
) -> Iterator[tuple[KeyChoice, ...]]:
    """Yield ways to lay the model out, those that need the least exchange between devices first."""
    yield ()
    reason = "the model does not fit into memory otherwise"
    if any(key.partition(".")[0] in ("parallel", "devices") for key in spec.overridden_keys):
        return
    full_recompute = KeyChoice("model.recompute", {"granularity": "full"}, reason)
    yield (full_recompute,)
    for size in range(2, devices + 1):
        if devices % size:
            continue
        tp, ep = KeyChoice("parallel.tp", size, reason), KeyChoice("parallel.ep", size, reason)
        if architecture.moe is None:
            yield (tp, full_recompute)
        else:
            yield (ep, full_recompute)
            yield (tp, ep, KeyChoice("parallel.etp", 1, "experts are split by ep"), full_recompute)
