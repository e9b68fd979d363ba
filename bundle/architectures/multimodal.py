"""Families that see images: how they read their Hugging Face config, and the tensors of their towers."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from bundle.architectures import families
from bundle.architectures.architecture import Architecture, Vision
from bundle.architectures.config import IRRELEVANT, Keys, read_rope

MOST_BLOCKS = 1024
Shaped = tuple[str, tuple[int, ...]]  # name, shape
_TEXT, _TOWER, _TIED = "text_config", "vision_config", "tie_word_embeddings"


def qwen2_5_vl(keys: Keys) -> Architecture:
    """Qwen2.5-VL: Qwen2 with positions in time, height and width behind a tower of windows."""
    text = _text(keys)
    read = families.qwen2(text, read_rope(text, default_base=1e6, multimodal=True))
    tied = read.tied_embeddings
    if text is not keys:
        keys.absorb(text, _TEXT)
        tied = keys.flag(_TIED, False) or tied  # transformers takes either
    for token in ("video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id"):
        keys.optional(token)
    tower = Keys(keys.mapping(_TOWER))
    vision = _windowed(tower, read.hidden_size, keys.integer("image_token_id", least=0))
    keys.absorb(tower, _TOWER)
    return replace(read, model_type="qwen2_5_vl", tied_embeddings=tied, vision=vision)


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


def _windowed(keys: Keys, width: int, image_token: int) -> Vision:
    """The tower of Qwen2.5-VL, whose embeddings are `width` wide."""
    keys.only("hidden_act", "silu", why="only gated SiLU (silu) is computed")
    keys.only("out_hidden_size", width, why=f"must be the decoder's hidden_size, {width}")
    channels, patch = keys.integer("in_channels", 3), keys.integer("patch_size")
    keys.only("in_chans", channels, why=f"must be in_channels, {channels}")
    keys.only("spatial_patch_size", patch, why=f"must be patch_size, {patch}")
    keys.integer("tokens_per_second", 0, least=0)  # of videos
    keys.number("initializer_range", 0.02, most=10.0)  # the decoder's counts
    axial = Keys(keys.mapping("rope_parameters"))
    axial.only("rope_type", "axial", why="the tower turns pairs by height and by width")
    axial.only("rope_theta", 1e4, 10000, why="the tower's frequencies are of 10000")
    keys.absorb(axial, "rope_parameters")
    return Vision(
        num_layers=keys.integer("depth", most=MOST_BLOCKS),
        hidden_size=keys.integer("hidden_size"),
        ffn_hidden_size=keys.integer("intermediate_size"),
        num_attention_heads=keys.integer("num_heads"),
        channels=channels,
        patch_size=patch,
        temporal_patch_size=keys.integer("temporal_patch_size", 2),
        merge_size=keys.integer("spatial_merge_size", 2),
        window_size=keys.integer("window_size"),
        full_layers=keys.integers("fullatt_block_indexes"),
        image_token=image_token,
    )


def tower(vision: Vision, width: int) -> Iterator[Shaped]:
    """The tensors of a tower whose embeddings are `width` wide.

    By the names of transformers' modules, in the order of their registration.
    """
    hidden, inner = vision.hidden_size, vision.ffn_hidden_size
    patch = (vision.channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    yield "patch_embed.proj.weight", (hidden, *patch)
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


def _linear(name: str, rows: int, columns: int) -> Iterator[Shaped]:
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


FAMILIES: dict[str, Callable[[Keys], Architecture]] = {"qwen2_5_vl": qwen2_5_vl}
