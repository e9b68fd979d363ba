"""Read the Hugging Face configs of families with a vision tower, and list the tensors of their towers."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from bundle.architectures import families
from bundle.architectures.architecture import Architecture, VisionArchitecture
from bundle.architectures.config import IRRELEVANT_KEYS, REQUIRED, ConfigKeys, read_rope

MOST_BLOCKS, MOST_POSITIONS = 1024, 2**20
_DEFAULT_FULL_ATTENTION_BLOCKS = (
    7,
    15,
    23,
    31,
)  # what transformers takes for Qwen2.5-VL's blocks without windows
NamedShape = tuple[str, tuple[int, ...]]  # name, shape
_TOKEN_KEY_PREFIX_BY_ROLE = {"video": "video", "start": "vision_start", "end": "vision_end"}
_TEXT_KEY, _TOWER_KEY, _TIED_KEY = "text_config", "vision_config", "tie_word_embeddings"


def qwen2_5_vl(keys: ConfigKeys) -> Architecture:
    """Return the architecture of Qwen2.5-VL.

    It is Qwen2 with positions in time, height and width, behind a tower with windows.
    """
    text = _read_text_keys(keys)
    decoder = families.qwen2(text, read_rope(text, default_base=1e6, multimodal=True))
    return _read_vision_model(keys, "qwen2_5_vl", text, decoder, _read_windowed_tower)


def qwen3_vl(keys: ConfigKeys) -> Architecture:
    """Return the architecture of Qwen3-VL.

    It is Qwen3 with positions in time, height and width. The tower adds embeddings to its first layers
    (deepstack).
    """
    keys.read_value(_TEXT_KEY, REQUIRED)
    text = _read_text_keys(keys)
    # Versions of transformers differ in the base that they take for one that is missing.
    decoder = families.qwen3(text, read_rope(text, default_base=None, multimodal=True, interleaved=True))
    return _read_vision_model(keys, "qwen3_vl", text, decoder, _read_deepstack_tower)


def qwen3_vl_moe(keys: ConfigKeys) -> Architecture:
    """Return the architecture of Qwen3-VL with Qwen3-MoE's experts, whose weights for a token sum to one."""
    keys.read_value(_TEXT_KEY, REQUIRED)
    text = _read_text_keys(keys)
    text.add_violation_unless(
        "norm_topk_prob", True, reason="must be true, as a token's expert weights sum to one in this family"
    )
    rope = read_rope(text, default_base=None, multimodal=True, interleaved=True)
    decoder = families.qwen3_moe(text, rope, norm_topk_prob=True)
    return _read_vision_model(keys, "qwen3_vl_moe", text, decoder, _read_deepstack_tower)


def _read_vision_model(
    keys: ConfigKeys,
    model_type: str,
    text: ConfigKeys,
    decoder: Architecture,
    read_tower: Callable[[ConfigKeys, dict[str, Any]], VisionArchitecture],
) -> Architecture:
    """Return a model of its `decoder` and of a tower that the rest of the config describes.

    `text` are the keys of the decoder.
    """
    tied = decoder.tied_embeddings
    if text is not keys:
        keys.add_nested_violations(text, _TEXT_KEY)
        tied = _read_tied_embeddings(
            keys, accepts_either=read_tower is _read_windowed_tower, decoder_tied=tied
        )
    keys.read_optional_integer("vision_token_id")
    tokens: dict[str, int | None] = {"image_token": keys.read_integer("image_token_id", least=0)}
    tokens |= {
        f"{role}_token": keys.read_optional_integer(f"{name}_token_id")
        for role, name in _TOKEN_KEY_PREFIX_BY_ROLE.items()
    }
    nested, width = ConfigKeys(keys.read_mapping_or_empty(_TOWER_KEY)), decoder.hidden_size
    nested.add_violation_unless(
        "out_hidden_size", width, reason=f"must be the decoder's hidden_size, {width}"
    )
    vision = read_tower(nested, _read_common_tower_fields(nested) | tokens)
    keys.add_nested_violations(nested, _TOWER_KEY)
    return replace(decoder, model_type=model_type, tied_embeddings=tied, vision=vision)


def _read_tied_embeddings(keys: ConfigKeys, *, accepts_either: bool, decoder_tied: bool) -> bool:
    """Return whether embeddings are tied, by either of the two keys (`accepts_either`) or by the outer one.

    For Qwen3-VL, transformers 5 reads only the outer key; the decoder's key may be its class's default.
    transformers 4 read the decoder's.
    """
    if accepts_either:
        return keys.read_flag(_TIED_KEY, False) or decoder_tied
    if decoder_tied and not keys.has_value(_TIED_KEY):
        keys.add_violation(
            _TIED_KEY,
            None,
            f"{_TEXT_KEY} has true, but some versions of transformers read this key; set both",
        )
    return keys.read_flag(_TIED_KEY, False)


def _read_text_keys(keys: ConfigKeys) -> ConfigKeys:
    """Return the decoder's keys: those of text_config, or, as on the Hub, those of the config itself.

    Some versions of transformers have written both.
    """
    nested = keys.read_mapping_or_empty(_TEXT_KEY)
    if not nested:
        return keys
    for name, value in nested.items():
        outer_value = keys.read_value(name)
        if outer_value not in (None, value) and name not in IRRELEVANT_KEYS | {_TIED_KEY}:
            keys.add_violation(
                name, outer_value, f"conflicts with {_TEXT_KEY} {value!r:.40}; keep one of the two"
            )
    return ConfigKeys(nested)


def _read_common_tower_fields(keys: ConfigKeys) -> dict[str, Any]:
    """Return the fields that the towers of all families have."""
    keys.read_number("initializer_range", 0.02, most=10.0)  # the decoder's counts
    axial = ConfigKeys(keys.read_mapping_or_empty("rope_parameters"))
    axial.add_violation_unless(
        "rope_type", "axial", reason="must be true: the tower rotates by height and by width"
    )
    axial.add_violation_unless(
        "rope_theta", 1e4, 10000, reason="must be 10000, the base of the tower's frequencies"
    )
    keys.add_nested_violations(axial, "rope_parameters")
    return {
        "num_layers": keys.read_integer("depth", most=MOST_BLOCKS),
        "hidden_size": keys.read_integer("hidden_size"),
        "ffn_hidden_size": keys.read_integer("intermediate_size"),
        "num_attention_heads": keys.read_integer("num_heads"),
        "channels": keys.read_integer("in_channels", 3),
        "patch_size": keys.read_integer("patch_size"),
        "temporal_patch_size": keys.read_integer("temporal_patch_size", 2),
        "merge_size": keys.read_integer("spatial_merge_size", 2),
    }


def _read_windowed_tower(keys: ConfigKeys, common_fields: dict[str, Any]) -> VisionArchitecture:
    """Return the tower of Qwen2.5-VL."""
    keys.add_violation_unless("hidden_act", "silu", reason="only gated SiLU (silu) is supported")
    channels, patch = common_fields["channels"], common_fields["patch_size"]
    keys.add_violation_unless("in_chans", channels, reason=f"must be in_channels, {channels}")
    keys.add_violation_unless("spatial_patch_size", patch, reason=f"must be patch_size, {patch}")
    full_layers = tuple(
        number for number in _DEFAULT_FULL_ATTENTION_BLOCKS if number < common_fields["num_layers"]
    )
    if keys.has_value("fullatt_block_indexes"):
        full_layers = keys.read_integer_list_or_empty("fullatt_block_indexes")
    window, tokens_per_second = (
        keys.read_integer("window_size"),
        keys.read_integer("tokens_per_second", 4, least=0),
    )
    return VisionArchitecture(
        "qwen2_5_vl",
        window_size=window,
        full_layers=full_layers,
        tokens_per_second=tokens_per_second,
        **common_fields,
    )


def _read_deepstack_tower(keys: ConfigKeys, common_fields: dict[str, Any]) -> VisionArchitecture:
    """Return the tower of Qwen3-VL."""
    keys.add_violation_unless(
        "hidden_act", "gelu_pytorch_tanh", reason="only the GELU of its class is supported"
    )
    keys.read_value("deepstack_visual_indexes", REQUIRED)  # transformers would take those of a large tower
    deepstack = keys.read_integer_list_or_empty("deepstack_visual_indexes")
    positions = keys.read_integer("num_position_embeddings", most=MOST_POSITIONS)
    return VisionArchitecture("qwen3_vl", positions=positions, deepstack=deepstack, **common_fields)


def list_tower_tensors(vision: VisionArchitecture, width: int) -> Iterator[NamedShape]:
    """Yield the tensors of a tower whose embeddings are `width` wide.

    They have the names of transformers' modules and the order of their registration.
    """
    yield from _TENSOR_LISTER_BY_FAMILY[vision.family](vision, width)


def _list_windowed_tower_tensors(vision: VisionArchitecture, width: int) -> Iterator[NamedShape]:
    hidden, inner = vision.hidden_size, vision.ffn_hidden_size
    yield "patch_embed.proj.weight", (hidden, *_get_channels_first_patch_shape(vision))
    for number in range(vision.num_layers):
        prefix = f"blocks.{number}"
        yield f"{prefix}.norm1.weight", (hidden,)
        yield f"{prefix}.norm2.weight", (hidden,)
        yield from _list_linear_tensors(f"{prefix}.attn.qkv", 3 * hidden, hidden)
        yield from _list_linear_tensors(f"{prefix}.attn.proj", hidden, hidden)
        yield from _list_linear_tensors(f"{prefix}.mlp.gate_proj", inner, hidden)
        yield from _list_linear_tensors(f"{prefix}.mlp.up_proj", inner, hidden)
        yield from _list_linear_tensors(f"{prefix}.mlp.down_proj", hidden, inner)
    merged = hidden * vision.patches_per_embedding
    yield "merger.ln_q.weight", (hidden,)
    yield from _list_linear_tensors("merger.mlp.0", merged, merged)
    yield from _list_linear_tensors("merger.mlp.2", width, merged)


def _list_qwen3_vl_tower_tensors(vision: VisionArchitecture, width: int) -> Iterator[NamedShape]:
    hidden, inner = vision.hidden_size, vision.ffn_hidden_size
    yield "patch_embed.proj.weight", (hidden, *_get_channels_first_patch_shape(vision))
    yield "patch_embed.proj.bias", (hidden,)
    yield "pos_embed.weight", (vision.positions, hidden)
    for number in range(vision.num_layers):
        prefix = f"blocks.{number}"
        yield from _list_norm_tensors(f"{prefix}.norm1", hidden)
        yield from _list_norm_tensors(f"{prefix}.norm2", hidden)
        yield from _list_linear_tensors(f"{prefix}.attn.qkv", 3 * hidden, hidden)
        yield from _list_linear_tensors(f"{prefix}.attn.proj", hidden, hidden)
        yield from _list_linear_tensors(f"{prefix}.mlp.linear_fc1", inner, hidden)
        yield from _list_linear_tensors(f"{prefix}.mlp.linear_fc2", hidden, inner)
    merged = hidden * vision.patches_per_embedding
    deepstack_mergers = [
        (f"deepstack_merger_list.{number}", merged) for number in range(len(vision.deepstack))
    ]
    for prefix, norm_width in (("merger", hidden), *deepstack_mergers):
        yield from _list_norm_tensors(f"{prefix}.norm", norm_width)
        yield from _list_linear_tensors(f"{prefix}.linear_fc1", merged, merged)
        yield from _list_linear_tensors(f"{prefix}.linear_fc2", width, merged)


def _get_channels_first_patch_shape(vision: VisionArchitecture) -> tuple[int, ...]:
    return vision.channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size


def _list_norm_tensors(name: str, width: int) -> Iterator[NamedShape]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _list_linear_tensors(name: str, rows: int, columns: int) -> Iterator[NamedShape]:
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


_TENSOR_LISTER_BY_FAMILY = {
    "qwen2_5_vl": _list_windowed_tower_tensors,
    "qwen3_vl": _list_qwen3_vl_tower_tensors,
}

FAMILIES: dict[str, Callable[[ConfigKeys], Architecture]] = {
    reader.__name__: reader for reader in (qwen2_5_vl, qwen3_vl, qwen3_vl_moe)
}
