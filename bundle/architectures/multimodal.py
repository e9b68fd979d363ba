"""Families that see images: how they read their Hugging Face config, and the tensors of their towers."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from bundle.architectures import families
from bundle.architectures.architecture import Architecture, Vision
from bundle.architectures.config import IRRELEVANT, REQUIRED, Keys, read_rope

MOST_BLOCKS, MOST_POSITIONS = 1024, 2**20
_FULL = (7, 15, 23, 31)  # what transformers takes for Qwen2.5-VL's blocks without windows
Shaped = tuple[str, tuple[int, ...]]  # name, shape
_TOKENS = {"video": "video", "start": "vision_start", "end": "vision_end"}
_TEXT, _TOWER, _TIED = "text_config", "vision_config", "tie_word_embeddings"


def qwen2_5_vl(keys: Keys) -> Architecture:
    """Qwen2.5-VL: Qwen2 with positions in time, height and width behind a tower of windows."""
    text = _text(keys)
    read = families.qwen2(text, read_rope(text, default_base=1e6, multimodal=True))
    return _seeing(keys, "qwen2_5_vl", text, read, _windowed)


def qwen3_vl(keys: Keys) -> Architecture:
    """Qwen3-VL: Qwen3 with positions in time, height and width; its first layers are told more of images."""
    keys.value(_TEXT, REQUIRED)
    text = _text(keys)
    # Versions of transformers differ in the base that they take for one that is missing.
    read = families.qwen3(text, read_rope(text, default_base=None, multimodal=True, interleaved=True))
    return _seeing(keys, "qwen3_vl", text, read, _deep)


def qwen3_vl_moe(keys: Keys) -> Architecture:
    """Qwen3-VL with Qwen3-MoE's experts, whose weights for a token always sum to one."""
    keys.value(_TEXT, REQUIRED)
    text = _text(keys)
    text.only("norm_topk_prob", True, why="the weights of a token's experts always sum to one in this family")
    rope = read_rope(text, default_base=None, multimodal=True, interleaved=True)
    read = families.qwen3_moe(text, rope, norm_topk_prob=True)
    return _seeing(keys, "qwen3_vl_moe", text, read, _deep)


def _seeing(
    keys: Keys,
    model_type: str,
    text: Keys,
    read: Architecture,
    tower: Callable[[Keys, dict[str, Any]], Vision],
) -> Architecture:
    """A decoder that was `read` from its own keys, with the rest of a config that holds them."""
    tied = read.tied_embeddings
    if text is not keys:
        keys.absorb(text, _TEXT)
        tied = _tied(keys, either=tower is _windowed, decoders=tied)
    keys.optional("vision_token_id")
    tokens: dict[str, int | None] = {"image_token": keys.integer("image_token_id", least=0)}
    tokens |= {f"{of}_token": keys.optional(f"{name}_token_id") for of, name in _TOKENS.items()}
    nested, width = Keys(keys.mapping(_TOWER)), read.hidden_size
    nested.only("out_hidden_size", width, why=f"must be the decoder's hidden_size, {width}")
    vision = tower(nested, _patches(nested) | tokens)
    keys.absorb(nested, _TOWER)
    return replace(read, model_type=model_type, tied_embeddings=tied, vision=vision)


def _tied(keys: Keys, *, either: bool, decoders: bool) -> bool:
    """Whether a config with a decoder's own says that embeddings are tied: `either` of them, or the first.

    Of Qwen3-VL transformers 5 asks the config alone, whose decoder's may say what its class has by default;
    transformers 4 asked the decoder's.
    """
    if either:
        return keys.flag(_TIED, False) or decoders
    if decoders and not keys.present(_TIED):
        keys.refuse(
            _TIED, None, f"{_TEXT} says true, and versions of transformers differ in whom they ask: say it"
        )
    return keys.flag(_TIED, False)


def _text(keys: Keys) -> Keys:
    """The decoder's keys: those of text_config, or, as on the Hub, those of the config itself.

    Some versions of transformers have written both.
    """
    nested = keys.mapping(_TEXT)
    if not nested:
        return keys
    for name, value in nested.items():
        beside = keys.value(name)
        if beside not in (None, value) and name not in IRRELEVANT | {_TIED}:
            keys.refuse(name, beside, f"{_TEXT} says {value!r:.40}; keep one of the two")
    return Keys(nested)


def _patches(keys: Keys) -> dict[str, Any]:
    """What the towers of all families have in common."""
    keys.number("initializer_range", 0.02, most=10.0)  # the decoder's counts
    axial = Keys(keys.mapping("rope_parameters"))
    axial.only("rope_type", "axial", why="the tower turns pairs by height and by width")
    axial.only("rope_theta", 1e4, 10000, why="the tower's frequencies are of 10000")
    keys.absorb(axial, "rope_parameters")
    return {
        "num_layers": keys.integer("depth", most=MOST_BLOCKS),
        "hidden_size": keys.integer("hidden_size"),
        "ffn_hidden_size": keys.integer("intermediate_size"),
        "num_attention_heads": keys.integer("num_heads"),
        "channels": keys.integer("in_channels", 3),
        "patch_size": keys.integer("patch_size"),
        "temporal_patch_size": keys.integer("temporal_patch_size", 2),
        "merge_size": keys.integer("spatial_merge_size", 2),
    }


def _windowed(keys: Keys, patches: dict[str, Any]) -> Vision:
    """The tower of Qwen2.5-VL."""
    keys.only("hidden_act", "silu", why="only gated SiLU (silu) is computed")
    channels, patch = patches["channels"], patches["patch_size"]
    keys.only("in_chans", channels, why=f"must be in_channels, {channels}")
    keys.only("spatial_patch_size", patch, why=f"must be patch_size, {patch}")
    full = tuple(number for number in _FULL if number < patches["num_layers"])
    if keys.present("fullatt_block_indexes"):
        full = keys.integers("fullatt_block_indexes")
    window, pace = keys.integer("window_size"), keys.integer("tokens_per_second", 4, least=0)
    return Vision("qwen2_5_vl", window_size=window, full_layers=full, tokens_per_second=pace, **patches)


def _deep(keys: Keys, patches: dict[str, Any]) -> Vision:
    """The tower of Qwen3-VL."""
    keys.only("hidden_act", "gelu_pytorch_tanh", why="only the GELU of its class is computed")
    keys.value("deepstack_visual_indexes", REQUIRED)  # transformers would take those of a large tower
    deepstack = keys.integers("deepstack_visual_indexes")
    positions = keys.integer("num_position_embeddings", most=MOST_POSITIONS)
    return Vision("qwen3_vl", positions=positions, deepstack=deepstack, **patches)


def tower(vision: Vision, width: int) -> Iterator[Shaped]:
    """The tensors of a tower whose embeddings are `width` wide.

    By the names of transformers' modules, in the order of their registration.
    """
    yield from _TOWERS[vision.family](vision, width)


def _tensors_windowed(vision: Vision, width: int) -> Iterator[Shaped]:
    hidden, inner = vision.hidden_size, vision.ffn_hidden_size
    yield "patch_embed.proj.weight", (hidden, *_patch(vision))
    for number in range(vision.num_layers):
        at = f"blocks.{number}"
        yield f"{at}.norm1.weight", (hidden,)
        yield f"{at}.norm2.weight", (hidden,)
        yield from _linear(f"{at}.attn.qkv", 3 * hidden, hidden)
        yield from _linear(f"{at}.attn.proj", hidden, hidden)
        yield from _linear(f"{at}.mlp.gate_proj", inner, hidden)
        yield from _linear(f"{at}.mlp.up_proj", inner, hidden)
        yield from _linear(f"{at}.mlp.down_proj", hidden, inner)
    merged = hidden * vision.patches
    yield "merger.ln_q.weight", (hidden,)
    yield from _linear("merger.mlp.0", merged, merged)
    yield from _linear("merger.mlp.2", width, merged)


def _tensors_deep(vision: Vision, width: int) -> Iterator[Shaped]:
    hidden, inner = vision.hidden_size, vision.ffn_hidden_size
    yield "patch_embed.proj.weight", (hidden, *_patch(vision))
    yield "patch_embed.proj.bias", (hidden,)
    yield "pos_embed.weight", (vision.positions, hidden)
    for number in range(vision.num_layers):
        at = f"blocks.{number}"
        yield from _norm(f"{at}.norm1", hidden)
        yield from _norm(f"{at}.norm2", hidden)
        yield from _linear(f"{at}.attn.qkv", 3 * hidden, hidden)
        yield from _linear(f"{at}.attn.proj", hidden, hidden)
        yield from _linear(f"{at}.mlp.linear_fc1", inner, hidden)
        yield from _linear(f"{at}.mlp.linear_fc2", hidden, inner)
    merged = hidden * vision.patches
    behind = [(f"deepstack_merger_list.{number}", merged) for number in range(len(vision.deepstack))]
    for at, normed in (("merger", hidden), *behind):
        yield from _norm(f"{at}.norm", normed)
        yield from _linear(f"{at}.linear_fc1", merged, merged)
        yield from _linear(f"{at}.linear_fc2", width, merged)


def _patch(vision: Vision) -> tuple[int, ...]:
    return vision.channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size


def _norm(name: str, width: int) -> Iterator[Shaped]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _linear(name: str, rows: int, columns: int) -> Iterator[Shaped]:
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


_TOWERS = {"qwen2_5_vl": _tensors_windowed, "qwen3_vl": _tensors_deep}

FAMILIES: dict[str, Callable[[Keys], Architecture]] = {
    read.__name__: read for read in (qwen2_5_vl, qwen3_vl, qwen3_vl_moe)
}
