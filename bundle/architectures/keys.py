"""Reading a Hugging Face config: typed access that remembers what was asked for and all that is wrong."""

from collections.abc import Mapping
from typing import Any

from bundle.errors import did_you_mean, nearest, shown

REQUIRED: Any = object()

# Far beyond any model, and small enough that a hostile file cannot make us allocate by its numbers.
LARGEST = 2**31 - 1

# Keys that do not change what a training step computes: whose file this is, what generation does by default,
# what other programs have noted. `quantization_config` says how the checkpoint's weights are stored, which is
# the weight loader's business.
IRRELEVANT = frozenset(
    {
        "architectures", "auto_map", "_name_or_path", "name_or_path", "transformers_version",
        "torch_dtype", "dtype", "model_type", "bos_token_id", "eos_token_id", "pad_token_id",
        "decoder_start_token_id", "use_cache", "pretraining_tp", "ep_size", "output_attentions",
        "output_hidden_states", "output_router_logits", "return_dict", "_attn_implementation",
        "attn_implementation", "quantization_config", "max_window_layers", "tokenizer_class",
        "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type",
        "is_decoder", "_attn_implementation_autoset", "attn_implementation_autoset", "sep_token_id", "prefix",
        "task_specific_params", "finetuning_task", "torchscript", "use_bfloat16", "tf_legacy_loss",
        "tie_encoder_decoder", "unsloth_version", "unsloth_fixed", "max_length", "min_length", "do_sample",
        "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k",
        "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
        "num_return_sequences", "encoder_no_repeat_ngram_size", "bad_words_ids", "output_scores",
        "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
        "suppress_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty",
    }
)  # fmt: skip


class Keys:
    """A config's keys; a family's reader takes what it understands, and the rest is a violation."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._taken: set[str] = set()
        self.violations: list[str] = []
        self.unreadable = False  # a number is missing or mistyped: what is computed from it means nothing

    def value(self, name: str, default: Any = None) -> Any:
        """Whatever stands under `name`; REQUIRED as default: a missing key is a violation."""
        self._taken.add(name)
        if name in self._config:
            return self._config[name]
        if default is REQUIRED:
            self._unreadable(f"{name}: missing")
        return default

    def _unreadable(self, violation: str) -> None:
        self.unreadable = True
        if violation not in self.violations:  # several readers may want one number
            self.violations.append(violation)

    def integer(self, name: str, default: Any = REQUIRED, least: int = 1, most: int = LARGEST) -> int:
        """The integer under `name`; a missing or impossible one is a violation and reads as `least`."""
        value = self.value(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        if value is not REQUIRED:
            self._unreadable(f"{name}: must be an integer from {least} to {most}, is {shown(value)}")
        return least

    def optional(self, name: str, default: Any = None) -> int | None:
        """The integer under `name`, or None for null; REQUIRED as default: the key must be there."""
        value = self.value(name, default)
        return None if value is None or value is REQUIRED else self.integer(name)

    def number(self, name: str, default: Any = REQUIRED, least: float = 0.0, most: float = 1e12) -> float:
        """The number under `name`; `least` and `most` are allowed."""
        value = self.value(name, default)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most:
            return float(value)
        if value is not REQUIRED:
            self._unreadable(f"{name}: must be a number from {least:g} to {most:g}, is {shown(value)}")
        return most

    def flag(self, name: str, default: Any = REQUIRED) -> bool:
        """The truth value under `name`."""
        value = self.value(name, default)
        if isinstance(value, bool):
            return value
        if value is not REQUIRED:
            self._unreadable(f"{name}: must be true or false, is {shown(value)}")
        return False

    def mapping(self, name: str) -> Mapping[str, Any]:
        """The mapping under `name`, empty for a missing key or null."""
        value = self.value(name, None)
        if value is None:
            return {}
        if isinstance(value, Mapping):
            return value
        self._unreadable(f"{name}: must be a mapping, is {shown(value)}")
        return {}

    def integers(self, name: str) -> tuple[int, ...]:
        """The list of non-negative integers under `name`, empty for a missing key or null."""
        value = self.value(name, None) or []
        if isinstance(value, list) and all(type(v) is int and 0 <= v <= LARGEST for v in value):
            return tuple(value)
        self._unreadable(f"{name}: must be a list of integers, is {shown(value)}")
        return ()

    def only(self, name: str, *allowed: Any, why: str) -> None:
        """A violation unless the key is missing or its value is one of `allowed`."""
        value = self.value(name, allowed[0])
        if not any(type(value) is type(a) and value == a for a in allowed):
            self.refuse(name, value, why)

    def refuse(self, name: str, value: Any, why: str) -> None:
        """Records that `name` asks for something that would not be computed."""
        self.violations.append(f"{name} {shown(value)}: {why}")

    def present(self, name: str) -> bool:
        """Whether the key is there and not null."""
        return self.value(name, None) is not None

    def ignore_rest(self) -> None:
        """Leaves the other keys alone: whose they are is already a violation."""
        self._taken.update(map(str, self._config))

    def rest(self) -> None:
        """Turns every key that nobody took and that asks for something into a violation."""
        known = self._taken | IRRELEVANT
        for name, value in self._config.items():
            if name not in known and value is not None:
                self.violations.append(f"{name}: unknown key{did_you_mean(nearest(str(name), known))}")

    def absorb(self, nested: "Keys", prefix: str) -> None:
        """Takes over the violations of a nested mapping's keys, unknown keys included."""
        nested.rest()
        self.unreadable |= nested.unreadable
        self.violations += [f"{prefix}.{v}" for v in nested.violations]
