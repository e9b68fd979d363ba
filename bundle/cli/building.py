"""From a task, a model and a data file to a recipe: what these leave open is chosen here, with a reason."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bundle.architectures import Architecture
from bundle.cli.request import JobRequest
from bundle.errors import ExitCode, UsageError
from bundle.launch import Start
from bundle.planning import plan_for
from bundle.planning.inputs import input_problems
from bundle.planning.plan import machine, refuse
from bundle.recipe import Recipe, flat, from_mapping
from bundle.recipe.completion import describe
from bundle.runs.directory import RunDirectory

if TYPE_CHECKING:
    from bundle.data import Corpus

# SFT: the default of transformers' TrainingArguments and of ms-swift. DPO: what Zephyr and Tulu 3 trained.
EPOCHS = {"sft": 3.0, "dpo": 1.0, "pretrain": 1.0}
SHORTEST = 64
PACK = 8192  # the pack length of the ready jobs (`recipes list`)
WINDOW = 4096  # the length of the first stage of Qwen3's and OLMo 2's pre-training
LARGEST_BATCH = 64
STEPS = 32  # of an epoch at least, where the data has as many samples
ENOUGH = 16  # samples of such a step, from which on samples may be longer


class KeyChoice(NamedTuple):
    """One key of a recipe, its value, and the reason for it."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Wish:
    """What a user gives in the place of a recipe."""

    task: str
    model: str
    data: Sequence[str]
    lora: bool = False
    epochs: float | None = None
    hardware: str | None = None  # instead of this machine
    request: JobRequest = field(default_factory=JobRequest)

    @property
    def name(self) -> str:
        """The recipe's name: that of the run directory where one is named, else of task and model."""
        output, how = self.request.run_directory, "-lora" if self.lora else ""
        text = output.absolute().name if output else f"{self.task}{how}-{Path(self.model).absolute().name}"
        return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).lstrip("._-")[:63] or self.task

    @property
    def set_keys(self) -> list[str]:
        """The keys that the user sets."""
        return [override.partition("=")[0].strip() for override in self.request.overrides or ()]

    def leaves_open(self, key: str) -> bool:
        """Whether the user sets neither this key nor a section that it stands in."""
        return not any(key == name or key.startswith(f"{name}.") for name in self.set_keys)


class Built(NamedTuple):
    """A recipe, the choices that it is made of beside its defaults, and its data."""

    recipe: Recipe
    choices: tuple[KeyChoice, ...]
    corpus: "Corpus"


def build_recipe(wish: Wish) -> Built:
    """Return the recipe for a wish, by the model's config, the data's lengths and this machine's devices.

    Where no layout fits, the recipe has the last one, whose plan says what is against it. Raise UsageError
    for inputs that are not there, JobFailed for corrupt rows and rows longer than the model's positions.
    """
    named = _choose_from_wish(wish)
    draft = _recipe(wish, named, _draft(SHORTEST))
    if wish.task != "pretrain":
        positions = draft.architecture.max_position_embeddings
        draft = _recipe(wish, named, _draft(_sample(positions, draft)))
    chosen = [*named, _length(draft, _read_data(draft, wish.request))]
    corpus = _read_data(_recipe(wish, chosen, _draft(SHORTEST)), wish.request)
    request = wish.request
    devices = request.devices_per_node or draft.devices.per_node
    if devices is None:
        hardware, _ = machine(draft.backend, request.backend or None, wish.hardware)
        devices = len(hardware.devices) or 1
    for layout in _layouts(wish, draft.architecture, devices):
        try:
            recipe = _recipe(wish, chosen, layout, _draft(SHORTEST))
        except UsageError:
            if not layout:
                raise
            continue  # these sizes do not divide the model
        choices = [*chosen, _batch(recipe, len(corpus.training), devices), *layout]
        recipe = _recipe(wish, choices)
        plan = plan_for(
            recipe,
            backend=request.backend or None,
            named=wish.hardware,
            allow_drift=request.allow_drift or (),
            per_node=request.devices_per_node,
        )
        if plan.code is not ExitCode.ENVIRONMENT_UNFIT:
            break
    return Built(recipe, tuple(_final(wish, recipe, choices)), corpus)


def _final(wish: Wish, recipe: Recipe, choices: Sequence[KeyChoice]) -> Iterator[KeyChoice]:
    """Yield what is chosen here, the keys that the user sets, and the defaults that decide the training."""
    by_key = {choice.key: choice for choice in choices if wish.leaves_open(choice.key)}
    values = dict(flat(recipe.dump()))
    for name in dict.fromkeys(wish.set_keys):
        keys = (key for key in values if key == name or key.startswith(f"{name}."))
        by_key |= {key: KeyChoice(key, values[key], "--set") for key in keys}
    for setting in describe(recipe.dump(), recipe.origins):
        by_key.setdefault(setting.key, KeyChoice(*setting))
    # A section that is chosen as such, like model.lora, stands in its keys.
    sections = {key.rpartition(".")[0] for key in by_key}
    yield from (choice for key, choice in by_key.items() if key not in sections)


def _choose_from_wish(wish: Wish) -> list[KeyChoice]:
    """Return what the wish says, and what follows from its task alone."""
    epochs = EPOCHS[wish.task] if wish.epochs is None else wish.epochs
    choices = [
        KeyChoice("name", wish.name, "names the run directory"),
        KeyChoice("task", wish.task, "what is learned"),
        KeyChoice("model.path", wish.model, "--model"),
        KeyChoice("data.path", list(wish.data), "--data"),
        KeyChoice("checkpoint.export", "hf", "a whole model, which transformers opens"),
    ]
    if wish.task != "pretrain":
        choices.append(KeyChoice("model.weights", "load", "fine-tuning needs trained weights"))
    if wish.lora:
        choices.append(KeyChoice("model.lora", {}, "--lora"))
    if wish.leaves_open("train.steps") and wish.leaves_open("train.samples"):
        reason = f"the default of {wish.task}" if wish.epochs is None else "--epochs"
        choices.append(KeyChoice("train.epochs", epochs, reason))
    return choices


def _draft(length: int) -> list[KeyChoice]:
    """Return stand-ins for what the data decides: enough to read it with."""
    return [KeyChoice("data.sequence_length", length, ""), KeyChoice("train.global_batch_size", 1, "")]


def _recipe(wish: Wish, *choices: Sequence[KeyChoice]) -> Recipe:
    """Return the recipe of these choices, of which the first one counts and what the user sets before all."""
    values: dict[str, Any] = {}
    for choice in (choice for group in choices for choice in group if wish.leaves_open(choice.key)):
        *sections, last = choice.key.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        place.setdefault(last, choice.value)
    return from_mapping(values, f"recipe {wish.name}", wish.request.overrides or ())


def _read_data(recipe: Recipe, request: JobRequest) -> "Corpus":
    """Return the data of a recipe, made into tokens. Raise for inputs that cannot be used."""
    directory = request.directory(recipe)
    run = RunDirectory(directory)
    # Whether an earlier run there is of the same recipe is known when the recipe is whole.
    others = run.problems(recipe, Start(fresh=True))
    begins = run.beginning(recipe, request.start())
    refuse(recipe, [*input_problems(recipe, directory, begins), *others])
    from bundle.data import prepare
    from bundle.data.cache import place
    from bundle.data.loader import told

    return prepare(recipe, place(recipe, directory), told())


def _sample(longest: int, recipe: Recipe) -> int:
    """Return the tokens of a sample that holds a document of this length and what stays with it."""
    if not recipe.data.packed:
        return longest
    multiple = recipe.alignment.sequence * 16
    return -(-longest // multiple) * multiple * recipe.documents_per_sample


def _length(recipe: Recipe, corpus: "Corpus") -> KeyChoice:
    """Return the length of samples: of rows the longest, of running text as the data gives enough of them.

    Packs are longer where the data fills enough of them: a device then has more to do at once.
    """
    key, positions = "data.sequence_length", recipe.architecture.max_position_embeddings
    if is_text := recipe.task == "pretrain":
        length, most = SHORTEST, min(WINDOW, positions)
        reason = f"of {corpus.tokens:,} tokens, for a model of {positions:,} positions"
    else:
        longest = max(int(store.lengths.max(initial=0)) for store in corpus.stores)
        length, most = 1 << (max(SHORTEST, _sample(longest, recipe)) - 1).bit_length(), PACK
        reason = f"holds the longest row ({longest:,} tokens)"
    if is_text or recipe.data.packed:
        while 2 * length <= most and corpus.tokens >= 2 * length * STEPS * ENOUGH:
            length *= 2
    return KeyChoice(key, length if recipe.data.packed else min(length, positions), reason)


def _batch(recipe: Recipe, samples: int, devices: int) -> KeyChoice:
    """Return the samples of a step: a power of two that leaves an epoch enough steps, for every replica."""
    batch = 1
    while 2 * batch <= LARGEST_BATCH and samples >= 2 * batch * STEPS:
        batch *= 2
    portion = recipe.train.micro_batch_size
    portion *= recipe.parallel.dp(devices) if recipe.parallel.fits(devices) else 1
    batch = -(-batch // portion) * portion
    reason = f"{samples:,} samples are {-(-samples // batch):,} steps an epoch"
    return KeyChoice("train.global_batch_size", batch, reason)


def _layouts(wish: Wish, architecture: Architecture, devices: int) -> Iterator[tuple[KeyChoice, ...]]:
    """Yield ways to lay the model out, those that need the least exchange between devices first."""
    yield ()
    why = "memory: the model does not fit otherwise"
    if any(key.partition(".")[0] in ("parallel", "devices") for key in wish.set_keys):
        return
    full = KeyChoice("model.recompute", {"granularity": "full"}, why)
    yield (full,)
    for size in range(2, devices + 1):
        if devices % size:
            continue
        tp, ep = KeyChoice("parallel.tp", size, why), KeyChoice("parallel.ep", size, why)
        if architecture.moe is None:
            yield (tp, full)
        else:
            yield (ep, full)
            yield (tp, ep, KeyChoice("parallel.etp", 1, "experts are divided by ep"), full)
