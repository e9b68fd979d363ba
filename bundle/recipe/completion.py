"""Fill in the keys that a recipe leaves out, by its model's directory and its task, before validation."""

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from bundle import hub
from bundle.architectures import Architecture, from_config
from bundle.architectures.contents import has_chat_template, has_tokenizer, has_weights
from bundle.architectures.tensors import Tensors
from bundle.errors import UsageError
from bundle.recipe import chat_template, defaults
from bundle.recipe.data import BYTE_VOCABULARY
from bundle.recipe.defaults import Default
from bundle.recipe.tasks import TASKS, Task

# The settings that `plan` and `check` print; those of adapters only where there are any.
SHOWN_SETTING_KEYS = (
    *("data.tokenizer", "data.template", "data.packed", "model.dtype"),
    *("optimizer.lr", "optimizer.min_lr", "optimizer.schedule"),
    *("optimizer.warmup_steps", "optimizer.warmup_ratio"),
    *("optimizer.weight_decay", "optimizer.betas", "optimizer.clip_grad"),
    *("checkpoint.export", "model.lora.rank", "model.lora.alpha"),
    *("model.lora.dropout", "model.lora.targets"),
)
_WARMUP_KEYS = ("optimizer.warmup_steps", "optimizer.warmup_ratio")


class Setting(NamedTuple):
    """A key of a recipe, its value, and where that comes from."""

    key: str
    value: Any
    origin: str


def complete(values: dict[str, Any]) -> dict[str, str]:
    """Fill in keys that `values` leave out, in new sections; return where each value comes from, by key.

    `values` are not validated yet: sections and keys of the wrong type are left to the schema.
    """
    draft = _Draft(values)
    if draft.get("model.lora") is True:
        draft.set("model.lora", {}, "")
    path = draft.get("model.path")
    if isinstance(path, str) and draft.can_default_to_model_tokenizer(
        Path(hub.build_cache_path_if_pinned(path))
    ):
        draft.fill("data.tokenizer", f"hf:{path}", "model.path")
    kind, _, tokenizer = str(draft.get("data.tokenizer")).partition(":")
    task = TASKS.get(str(draft.get("task") or "pretrain"), Task())
    if (
        kind == "hf"
        and not task.has_plain_text_rows
        and has_chat_template(Path(hub.build_cache_path_if_pinned(tokenizer)))
    ):
        draft.fill("data.template", "chat", f"{tokenizer} has a chat template")
    if task.samples_answers:
        draft.fill("data.validation", 0.0, "rl.evaluation has the questions to evaluate with")
        answers = draft.get("rl.prompts_per_step"), draft.get("rl.num_generations")
        match answers:
            case int(prompts), int(generations):
                draft.fill("train.global_batch_size", prompts * generations, "all answers of a step")
    if isinstance(draft.get("model.lora"), dict):
        for default in defaults.LORA_DEFAULTS:
            draft.fill(default.key, default.value, f"default of LoRA: {default.source}")
    kind = draft.defaults_table_key
    for default in defaults.DEFAULTS_BY_TRAINING_KIND.get(kind, ()):
        draft.fill_default(default, kind)
    return draft.origins


def list_shown_settings(recipe: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[Setting]:
    """Yield the settings of a dumped recipe that decide how it trains."""
    for key in SHOWN_SETTING_KEYS:
        value: Any = recipe
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None or key == "checkpoint.export":
            if key == "data.template" and chat_template.is_text(value):
                value = f"{len(value):,} characters of jinja"
            yield Setting(key, value, origins.get(key, "default"))


class _Draft:
    """The values of a recipe before they are validated, read and set by dotted keys."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self.origins: dict[str, str] = {}

    def get(self, key: str) -> Any:
        """Return the value of a key; None where it has none."""
        value: Any = self._values
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def has(self, key: str) -> bool:
        """Return whether the recipe gives the key a value, which may be null."""
        *sections, last = key.split(".")
        section = self.get(".".join(sections))
        return isinstance(section, dict) and last in section

    def set(self, key: str, value: Any, origin: str) -> None:
        """Set a key to a value, in copies of the sections that contain the key."""
        *sections, last = key.split(".")
        section = self._values
        for name in sections:
            inner = section.get(name)
            if inner is not None and not isinstance(inner, dict):
                return
            section[name] = dict(inner or {})
            section = section[name]
        section[last] = value
        if origin:
            self.origins[key] = origin

    def fill(self, key: str, value: Any, origin: str) -> None:
        """Set a key to a value where it has none."""
        if not self.has(key):
            self.set(key, value, origin)

    def fill_default(self, default: Default, kind: str) -> None:
        """Fill in one default of a kind of training."""
        key, origin = default.key, f"default of {kind}: {default.source}"
        if key == defaults.MIN_LR_RATIO_PSEUDO_KEY:
            lr = self.get("optimizer.lr")
            if isinstance(lr, float):
                self.fill("optimizer.min_lr", float(f"{lr * default.value:.6g}"), origin)
        elif key == defaults.BIAS_UPDATE_RATE_KEY and not self.has_steering_bias:
            return
        elif key == "data.packed" and (reason := self.unpacked_reason):
            self.fill(key, False, reason)
        elif not self.has(key) and not (key in _WARMUP_KEYS and any(map(self.has, _WARMUP_KEYS))):
            value = default.choose(self.parameters) if default.by_size else default.value
            self.set(key, value, origin)

    def can_default_to_model_tokenizer(self, path: Path) -> bool:
        """Return whether the model's directory has the tokenizer, or a tokenizer must be named."""
        reads_bytes = self.get("model.config.vocab_size") == BYTE_VOCABULARY
        return has_tokenizer(path) or (self.loads_weights and not reads_bytes)

    @property
    def loads_weights(self) -> bool:
        """True if training begins with published weights."""
        path, weights = self.get("model.path"), self.get("model.weights")
        return (
            isinstance(path, str)
            and weights != "random"
            and has_weights(Path(hub.build_cache_path_if_pinned(path)))
        )

    @property
    def defaults_table_key(self) -> str:
        """The kind of training, as the table of defaults has it; empty where it has none."""
        task, adapted = self.get("task") or "pretrain", isinstance(self.get("model.lora"), dict)
        if not self.loads_weights:
            large = task == "pretrain" and self.parameters >= defaults.LEAST_PRETRAINING_PARAMETERS
            return defaults.PRETRAINING_KIND if large else ""
        return defaults.KIND_BY_TASK_AND_LORA.get((task, adapted), "") if isinstance(task, str) else ""

    @property
    def unpacked_reason(self) -> str:
        """The reason why samples are not packed by default; empty where they can be."""
        rows = self.get("train.micro_batch_size")
        if isinstance(rows, int) and rows > 1:
            return "train.micro_batch_size is above 1"
        model = self.architecture
        if model is not None and (model.delta_net is not None or model.sinks):
            return f"{model.model_type} does not support packs"
        return ""

    @property
    def has_steering_bias(self) -> bool:
        """True if the model's routers have a steering bias."""
        model = self.architecture
        return model is not None and model.moe is not None and model.moe.expert_bias

    @cached_property
    def architecture(self) -> Architecture | None:
        """The model's architecture; None where its config describes none."""
        try:
            config = self.get("model.config")
            return from_config(config) if isinstance(config, dict) else None
        except UsageError:
            return None

    @cached_property
    def parameters(self) -> int:
        """The number of parameters of the model; 0 where its config describes none."""
        tensors = Tensors(self.architecture) if self.architecture else ()
        return sum(math.prod(tensor.shape) for tensor in tensors)
