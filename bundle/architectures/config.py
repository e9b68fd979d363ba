"""Read a Hugging Face config with types; the reader remembers the keys that were read and all that is wrong.

Rotary positions are as in transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters).
`transformers.modeling_rope_utils` says what each number means: defaults, and the factors of yarn.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bundle.architectures.architecture import RopeScaling
from bundle.errors import find_nearest, format_suggestion, format_value

REQUIRED: Any = object()

# Far beyond any model, and small enough that a hostile file cannot make us allocate by its numbers.
LARGEST_INTEGER = 2**31 - 1

# Keys that do not change what a training step computes: whose file this is, what other programs have noted.
# `quantization_config` says how the checkpoint's weights are stored, which the weight loader reads.
_NOTE_KEYS = {
    "architectures", "auto_map", "_name_or_path", "name_or_path", "transformers_version", "torch_dtype",
    "dtype", "model_type", "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id",
    "sep_token_id", "pretraining_tp", "ep_size", "quantization_config", "max_window_layers",
    "tokenizer_class", "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "prefix",
    "task_specific_params", "finetuning_task", "torchscript", "use_bfloat16", "tf_legacy_loss",
    "tie_encoder_decoder", "xla_device", "unsloth_version", "unsloth_fixed", "_commit_hash",
    "output_attentions", "output_hidden_states", "output_router_logits", "output_past", "return_dict",
    "use_return_dict", "tie_last_hidden_states", "attn_implementation", "_attn_implementation",
    "_attn_implementation_autoset", "attn_implementation_autoset", "_attn_implementation_internal",
    "experts_implementation", "_experts_implementation", "_experts_implementation_internal",
}  # fmt: skip
# What transformers' GenerationConfig has, which older configs hold as well: defaults of generation.
_GENERATION_KEYS = {
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "early_stopping", "max_time",
    "stop_strings", "do_sample", "num_beams", "num_beam_groups", "use_mtp", "use_cache",
    "cache_implementation", "cache_config", "max_cache_len", "return_legacy_cache", "prefill_chunk_size",
    "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "diversity_penalty", "repetition_penalty", "encoder_repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "force_words_ids",
    "renormalize_logits", "constraints", "forced_bos_token_id", "forced_eos_token_id",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "force_bos_token_to_be_generated", "begin_suppress_tokens", "sequence_bias", "token_healing",
    "guidance_scale", "low_memory", "watermarking_config", "num_return_sequences", "output_scores",
    "output_logits", "return_dict_in_generate", "is_assistant", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_early_exit",
    "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "speculation_type",
    "prompt_lookup_num_tokens", "max_matching_ngram_size", "compile_config", "disable_compile",
    "continuous_batching_config", "penalty_alpha", "dola_layers", "_from_model_config",
}  # fmt: skip
# Keys of transformers' base class that ask for what a recipe says elsewhere, or for a head that none is
# trained with: they are ignored, and a plan says so.
IGNORED_KEYS_TO_REPORT = frozenset(
    {"gradient_checkpointing", "num_labels", "id2label", "label2id", "problem_type"}
)
IRRELEVANT_KEYS = frozenset(_NOTE_KEYS | _GENERATION_KEYS | IGNORED_KEYS_TO_REPORT)
# Keys of the same class that change the model unless they are empty, and what they would do.
_MUST_BE_EMPTY = {
    "pruned_heads": "leaving out attention heads is not supported",
    "add_cross_attention": "only decoders without cross attention are supported",
    "cross_attention_hidden_size": "only decoders without cross attention are supported",
    "per_layer_config": "values per layer are not supported",
}


class ConfigKeys:
    """A config's keys; a family's reader reads those that it knows, and the others are violations."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._read_names: set[str] = set()
        self.violations: list[str] = []
        self.has_unreadable = False  # a number is missing or mistyped: what is computed from it means nothing

    def read_value(self, name: str, default: Any = None) -> Any:
        """Return any value under `name`; REQUIRED as default: a missing key is a violation."""
        self._read_names.add(name)
        if name in self._config:
            return self._config[name]
        if default is REQUIRED:
            self._add_unreadable(f"{name}: missing")
        return default

    def _add_unreadable(self, violation: str) -> None:
        self.has_unreadable = True
        if violation not in self.violations:  # several readers may want one number
            self.violations.append(violation)

    def _read_or_record_violation(
        self, name: str, default: Any, fits: Callable[[Any], bool], requirement: str, fallback: Any
    ) -> Any:
        """Return the value under `name`.

        Record a missing or invalid value as a violation, and return `fallback`.
        """
        value = self.read_value(name, default)
        if fits(value):
            return value
        if value is not REQUIRED:
            self._add_unreadable(f"{name}: must be {requirement}, but is {format_value(value)}")
        return fallback

    def read_integer(
        self, name: str, default: Any = REQUIRED, least: int = 1, most: int = LARGEST_INTEGER
    ) -> int:
        """Return the integer under `name`; a missing or impossible one is a violation and becomes `least`."""

        def fits(value: Any) -> bool:
            return type(value) is int and least <= value <= most

        return int(
            self._read_or_record_violation(name, default, fits, f"an integer from {least} to {most}", least)
        )

    def read_optional_integer(self, name: str, default: Any = None) -> int | None:
        """Return the integer under `name`, or None for null; REQUIRED as default: the key must be there."""
        value = self.read_value(name, default)
        return None if value is None or value is REQUIRED else self.read_integer(name, default)

    def read_number(
        self, name: str, default: Any = REQUIRED, least: float = 0.0, most: float = 1e12
    ) -> float:
        """Return the number under `name`, from `least` to `most`, both included."""

        def fits(value: Any) -> bool:
            return type(value) in (int, float) and least <= value <= most

        return float(
            self._read_or_record_violation(name, default, fits, f"a number from {least:g} to {most:g}", most)
        )

    def read_flag(self, name: str, default: Any = REQUIRED) -> bool:
        """Return the truth value under `name`."""
        return bool(
            self._read_or_record_violation(
                name, default, lambda v: isinstance(v, bool), "true or false", False
            )
        )

    def read_mapping_or_empty(self, name: str) -> Mapping[str, Any]:
        """Return the mapping under `name`; empty for a missing key or null."""
        return (
            self._read_or_record_violation(
                name, None, lambda v: v is None or isinstance(v, Mapping), "a mapping", None
            )
            or {}
        )

    def read_integer_list_or_empty(self, name: str) -> tuple[int, ...]:
        """Return the list of non-negative integers under `name`; empty for a missing key or null."""

        def fits(value: Any) -> bool:
            return isinstance(value, list) and all(
                type(v) is int and 0 <= v <= LARGEST_INTEGER for v in value
            )

        return tuple(
            self._read_or_record_violation(name, None, lambda v: not v or fits(v), "a list of integers", None)
            or ()
        )

    def add_violation_unless(self, name: str, *allowed: Any, reason: str) -> None:
        """Record a violation unless the key is missing or its value is one of `allowed`."""
        value = self.read_value(name, allowed[0])
        if not any(type(value) is type(a) and value == a for a in allowed):
            self.add_violation(name, value, reason)

    def add_violation(self, name: str, value: Any, reason: str) -> None:
        """Record that `name` asks for something that is not computed."""
        self.violations.append(f"{name} {format_value(value)}: {reason}")

    def has_value(self, name: str) -> bool:
        """Return whether the key is there and not null."""
        return self.read_value(name, None) is not None

    def ignore_rest(self) -> None:
        """Ignore the other keys: the kind that they belong to is already a violation."""
        self._read_names.update(map(str, self._config))

    def add_unknown_key_violations(self) -> None:
        """Record a violation for every key that was not read and asks for something."""
        known = self._read_names | IRRELEVANT_KEYS
        for name, value in self._config.items():
            if name in _MUST_BE_EMPTY and name not in self._read_names:
                if value:
                    self.add_violation(name, value, f"{_MUST_BE_EMPTY[name]}; leave the key out")
            elif name not in known and value is not None:
                suggestion = format_suggestion(find_nearest(str(name), self._read_names))
                self.violations.append(f"{name}: unknown key{suggestion}")

    def add_nested_violations(self, nested: "ConfigKeys", prefix: str) -> None:
        """Add the violations of a nested mapping's keys, unknown keys included."""
        nested.add_unknown_key_violations()
        self.has_unreadable |= nested.has_unreadable
        self.violations += [f"{prefix}.{v}" for v in nested.violations]


ROPE_KINDS = ("default", "linear", "llama3", "yarn")


class Rope(NamedTuple):
    """The rotary positions: base frequency, rotated fraction of a head, stretching, and sections.

    Sections are the pairs that turn by time, height and width.
    """

    base: float
    fraction: float
    scaling: RopeScaling | None
    sections: tuple[int, ...] = ()
    interleaved: bool = False


def read_rope(
    keys: ConfigKeys,
    default_base: float | None = 10000.0,
    default_fraction: float | None = None,
    *,
    multimodal: bool = False,
    interleaved: bool = False,
) -> Rope:
    """Return the rotary positions, `multimodal` ones in time, height and width; violations go to `keys`.

    `interleaved`: pairs take turns, which some configs also say. Without a `default_base` the config must
    have one. Without a `default_fraction` the family's class rotates whole heads, whatever
    partial_rotary_factor says.
    """
    has_parameters = keys.has_value("rope_parameters")
    name = "rope_parameters" if has_parameters else "rope_scaling"
    if has_parameters and keys.has_value("rope_scaling"):
        keys.add_violation("rope_scaling", "...", "set next to rope_parameters; keep one of the two")
    nested = ConfigKeys(keys.read_mapping_or_empty(name))
    if default_base is None and not nested.has_value("rope_theta"):
        keys.read_value("rope_theta", REQUIRED)
    base = _read_either(keys, nested, "rope_theta", default_base or 1.0, least=1.0, most=1e12)
    fraction = _read_either(
        keys, nested, "partial_rotary_factor", default_fraction or 1.0, least=0.0, most=1.0
    )
    if default_fraction is None and fraction != 1.0:
        reason = "this family's class in transformers rotates whole heads; leave the key out"
        keys.add_violation("partial_rotary_factor", fraction, reason)
    sections = _read_sections(nested) if multimodal else ()
    if multimodal:
        nested.add_violation_unless(
            "mrope_interleaved", interleaved, reason="the family's class has another order"
        )
    scaling = _read_scaling(keys, nested, base, *(("mrope",) if multimodal else ()))
    keys.add_nested_violations(nested, name)
    return Rope(base, fraction, scaling, sections, interleaved)


def _read_sections(nested: ConfigKeys) -> tuple[int, ...]:
    """Return how many pairs turn by time, by height and by width."""
    sections = nested.read_integer_list_or_empty("mrope_section")
    if len(sections) != 3:
        nested.add_violation("mrope_section", list(sections), "must be three: time, height, width")
    return sections


def _read_either(
    keys: ConfigKeys, nested: ConfigKeys, name: str, default: float, *, least: float, most: float
) -> float:
    """Return the number under `name` in the rotary parameters, or else outside, as in transformers 4."""
    outer_value = keys.read_number(name, default, least, most) if keys.has_value(name) else default
    if not nested.has_value(name):
        return outer_value
    outer_raw, nested_raw = (
        keys.read_value(name),
        nested.read_value(name),
    )  # as they stand in the file, whatever is wrong
    if keys.has_value(name) and outer_raw != nested_raw:
        keys.add_violation(
            name, outer_raw, f"the rotary parameters have {format_value(nested_raw)}; keep one of the two"
        )
    return nested.read_number(name, default, least, most)


def _read_scaling(
    keys: ConfigKeys, nested: ConfigKeys, base: float, *default_kinds: str
) -> RopeScaling | None:
    """Return the stretching; None for kinds in `default_kinds`."""
    kind = nested.read_value("rope_type") or nested.read_value("type") or "default"
    nested.add_violation_unless("type", None, kind, *default_kinds, reason=f"differs from rope_type {kind}")
    if kind in ("default", *default_kinds):
        return None
    if kind not in ROPE_KINDS:
        nested.add_violation("rope_type", kind, f"not supported; supported: {', '.join(ROPE_KINDS)}")
        nested.ignore_rest()
        return None
    factor = nested.read_number("factor", least=1.0)
    if kind == "linear":
        return RopeScaling("linear", factor)
    original = (
        nested.read_integer("original_max_position_embeddings")
        if nested.has_value("original_max_position_embeddings")
        else keys.read_integer("max_position_embeddings")
    )
    if kind == "llama3":
        return _read_llama3(nested, factor, original)
    if base == 1.0:
        keys.add_violation("rope_theta", base, "yarn divides by its logarithm")
    return _read_yarn(nested, factor, original)


def _read_llama3(nested: ConfigKeys, factor: float, original: int) -> RopeScaling:
    low, high = nested.read_number("low_freq_factor"), nested.read_number("high_freq_factor")
    if not nested.has_unreadable and not 0 < low < high:
        nested.add_violation(
            "high_freq_factor", high, f"must be above low_freq_factor, {low:g}, which must be above 0"
        )
    return RopeScaling("llama3", factor, original, low_freq_factor=low, high_freq_factor=high)


def _read_yarn(nested: ConfigKeys, factor: float, original: int) -> RopeScaling:
    mscale, all_dim, attention_factor = (
        _read_number_or_zero(nested, n) for n in ("mscale", "mscale_all_dim", "attention_factor")
    )
    if nested.has_value("attention_factor"):
        concentration = attention_factor
        if not concentration:
            nested.add_violation("attention_factor", attention_factor, "leaves no values to rotate")
    elif mscale and all_dim:
        concentration = _compute_mscale(factor, mscale) / _compute_mscale(factor, all_dim)
    else:
        concentration = _compute_mscale(factor, 1.0)
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=_read_number_or_zero(nested, "beta_fast") or 32.0,
        beta_slow=_read_number_or_zero(nested, "beta_slow") or 1.0,
        truncate=nested.read_flag("truncate", True),
        concentration=concentration,
        softmax_mscale=all_dim,
    )


def _read_number_or_zero(nested: ConfigKeys, name: str) -> float:
    """Return the number under `name`; 0 for a missing key or null, which transformers treats alike."""
    return nested.read_number(name) if nested.has_value(name) else 0.0


def _compute_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0
