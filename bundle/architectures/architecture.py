"""Describe a model as data: the numbers that decide its tensors, its layout and its arithmetic."""

import math
from dataclasses import dataclass

# Rows of the embedding are a multiple that does not follow tp: a padding that followed tp (Megatron-LM's own
# rule) would make another tensor of it, and another checkpoint, in every layout.
VOCABULARY_MULTIPLE = 128


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary positions are stretched beyond the length of pre-training, as `transformers` computes it."""

    kind: str  # linear | llama3 | yarn
    factor: float
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn's two bounds are whole pairs
    concentration: float = 1.0  # sines and cosines, of queries and of keys, are multiplied by it
    softmax_mscale: float = 0.0  # latent attention: logits grow by (0.1 x this x ln(factor) + 1)²


@dataclass(frozen=True, slots=True)
class MLA:
    """Multi-head latent attention: ranks of the two compressions and the widths of one head."""

    q_lora_rank: int | None  # None: queries are not compressed
    kv_lora_rank: int
    qk_head_dim: int  # the part without positions
    qk_pos_emb_head_dim: int
    v_head_dim: int
    norm_epsilon: float = 1e-6  # of the norms between the projections: DeepSeek's code knows no other

    @property
    def q_head_dim(self) -> int:
        """The width of one head of queries and keys as the attention kernel sees it."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim


@dataclass(frozen=True, slots=True)
class MoE:
    """The experts, where they stand, and how a token chooses among them."""

    num_experts: int
    topk: int
    ffn_hidden_size: int  # of one expert
    shared_ffn_hidden_size: int  # of all shared experts together; 0: none
    layer_pattern: tuple[int, ...]  # per decoder layer: 1 experts, 0 dense
    score_function: str = "softmax"  # softmax | sigmoid
    pre_softmax: bool = False  # softmax over all experts, then top-k (no renormalisation)
    expert_bias: bool = False  # a bias that steers the choice but not the weights (DeepSeek-V3)
    scaling_factor: float = 1.0
    groups: int | None = None
    group_topk: int | None = None
    group_score_topk: int = 2  # a group counts by the sum of so many of its best scores
    aux_loss_coeff: float = 0.0  # of the loss that balances experts
    aux_loss_per_sequence: bool = False
    unused_aux_loss_coeff: float = 0.0  # stands in the config, which does not ask for the loss
    shared_gate: bool = False  # a token's own weight for the shared experts


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Gated delta nets: linear attention with a state of keys times values, in place of attention."""

    num_key_heads: int  # of queries, too
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    convolution: int  # a token's channels are mixed with those of so many tokens, itself the last
    layers: tuple[int, ...]  # per decoder layer: 1 a gated delta net, 0 attention

    @property
    def projection_widths(self) -> tuple[int, ...]:
        """The widths of the first projection's outputs: queries, keys, values, gates, betas and alphas."""
        keys, values = self.num_key_heads * self.key_head_dim, self.num_value_heads * self.value_head_dim
        return keys, keys, values, values, self.num_value_heads, self.num_value_heads

    @property
    def convolution_widths(self) -> tuple[int, ...]:
        """The widths of the outputs that go through the convolution: queries, keys and values."""
        return self.projection_widths[:3]


@dataclass(frozen=True, slots=True)
class VisionArchitecture:
    """The tower that makes embeddings of images and videos, and the tokens that these embeddings replace."""

    family: str  # qwen2_5_vl: RMS norms, gates, windows | qwen3_vl: layer norms, learned positions, deepstack
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    channels: int  # of a pixel
    patch_size: int  # pixels of a patch in height and in width
    temporal_patch_size: int  # frames of a patch
    merge_size: int  # so many patches in height, and as many in width, are one embedding
    image_token: int
    window_size: int = 0  # pixels: outside of `full_layers` patches see their own window alone; 0: none do
    full_layers: tuple[int, ...] = ()
    positions: int = 0  # learned ones, a square that is stretched over each image
    deepstack: tuple[int, ...] = ()  # blocks behind which embeddings are made for the decoder's first layers
    video_token: int | None = None
    start_token: int | None = None  # before an image or a video
    end_token: int | None = None
    tokens_per_second: int = 0  # by which a video's positions in time count on

    @property
    def has_frame_timestamps(self) -> bool:
        """True if the frames of a video stand one by one, each behind its time in words."""
        return self.family == "qwen3_vl"

    @property
    def values_per_patch(self) -> int:
        """The number of values of one patch."""
        return self.channels * self.temporal_patch_size * self.patch_size**2

    @property
    def patches_per_embedding(self) -> int:
        """The number of patches that are merged into one embedding."""
        return self.merge_size**2


@dataclass(frozen=True, slots=True)
class Architecture:
    """One decoder-only transformer with gated feed-forward layers and RMS norms."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int  # of dense layers
    num_attention_heads: int
    num_query_groups: int  # key/value heads
    kv_channels: int  # width of one head; with MLA the width of a value
    vocab_size: int
    max_position_embeddings: int
    tied_embeddings: bool = False
    norm_epsilon: float = 1e-6
    rotary_base: float = 10000.0
    rotary_fraction: float = 1.0  # of a head's width that is rotated
    rope_scaling: RopeScaling | None = None
    rotary_sections: tuple[int, ...] = ()  # pairs that turn by time, height and width (mrope); (): by one
    rotary_interleaved: bool = False  # these take turns; else one section follows the other
    qk_layernorm: bool = False
    qkv_bias: bool = False
    linear_bias: bool = False  # of the output projection, of routers and of every expert's two layers
    gate_limit: float | None = None  # None: SiLU; else the clamped gate of gpt-oss, whose values end here
    sinks: bool = False  # a learned logit for each head, in every softmax, of a key without a value
    window: int | None = None  # a token sees so many, itself the last, in layers that `windows` says 1 of
    windows: tuple[int, ...] = ()
    output_gate: bool = False  # attention's output is multiplied by the sigmoid of a second query
    zero_centered_norms: bool = False  # norms multiply by 1 + weight; that in a gated delta net does not
    delta_net: DeltaNet | None = None
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    mla: MLA | None = None
    moe: MoE | None = None
    mtp_layers: int = 0
    vision: VisionArchitecture | None = None

    @property
    def head_dims(self) -> tuple[int, int]:
        """The widths of one head of (queries and keys, values)."""
        if self.mla:
            return self.mla.q_head_dim, self.mla.v_head_dim
        return self.kv_channels, self.kv_channels

    @property
    def num_attention_layers(self) -> int:
        """The number of decoder layers with attention instead of a gated delta net."""
        return self.num_layers - (sum(self.delta_net.layers) if self.delta_net else 0)

    @property
    def moe_layer_pattern(self) -> tuple[int, ...]:
        """The kind of each decoder layer: 1 experts, 0 dense. MTP layers are of the last layer's kind."""
        return self.moe.layer_pattern if self.moe else (0,) * self.num_layers


def pad_vocab_to_lcm(vocab_size: int, tp: int) -> int:
    """Return the rows of the embedding: the next multiple of 128.

    Where tp does not divide 128, it is the next multiple of lcm(128, tp).
    """
    multiple = math.lcm(VOCABULARY_MULTIPLE, tp)
    return -(-vocab_size // multiple) * multiple


def find_contradictions(a: Architecture) -> list[str]:
    """Return every reason why these numbers cannot be one model, in the words of a Hugging Face config."""
    violations = []
    if a.num_attention_heads % a.num_query_groups:
        violations.append(
            f"num_attention_heads {a.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {a.num_query_groups}"
        )
    rotated = a.mla.qk_pos_emb_head_dim if a.mla else a.kv_channels * a.rotary_fraction
    if rotated % 2:
        violations.append(f"rotary positions need pairs: {rotated:g} rotated values per head are not even")
    if a.rotary_sections and sum(a.rotary_sections) != rotated / 2:
        violations.append(
            f"mrope_section {list(a.rotary_sections)} has {sum(a.rotary_sections)} pairs, but a head has"
            f" {rotated / 2:g}"
        )
    if a.vision:
        violations += _find_tower_contradictions(a.vision, a.vocab_size)
        if len(a.vision.deepstack) > a.num_layers:
            violations.append(
                f"vision_config.deepstack_visual_indexes: {len(a.vision.deepstack)} indexes are too many"
                f" for a decoder of {a.num_layers} layers"
            )
    if a.delta_net and a.delta_net.num_value_heads % a.delta_net.num_key_heads:
        violations.append(
            f"linear_num_value_heads {a.delta_net.num_value_heads} is not a multiple of"
            f" linear_num_key_heads {a.delta_net.num_key_heads}"
        )
    if a.moe:
        violations += _find_routing_contradictions(a.moe)
    return violations


def _find_tower_contradictions(vision: VisionArchitecture, vocab_size: int) -> list[str]:
    violations = []
    width, heads, unit = vision.hidden_size, vision.num_attention_heads, vision.patch_size * vision.merge_size
    if width % (4 * heads):
        violations.append(
            f"vision_config.hidden_size {width} is not a multiple of 4 x num_heads {heads}, as rotation by"
            " height and width needs"
        )
    if vision.window_size % unit:
        violations.append(
            f"vision_config.window_size {vision.window_size} is not a multiple of patch_size x"
            f" spatial_merge_size, {unit}"
        )
    blocks = {"fullatt_block_indexes": vision.full_layers, "deepstack_visual_indexes": vision.deepstack}
    for name, numbers in blocks.items():
        if beyond := [number for number in numbers if number >= vision.num_layers]:
            violations.append(f"vision_config.{name} {beyond}: there are only {vision.num_layers} blocks")
    if len(set(vision.deepstack)) < len(vision.deepstack):
        violations.append(
            f"vision_config.deepstack_visual_indexes {list(vision.deepstack)}: a block stands twice"
        )
    tokens = {
        "image_token_id": vision.image_token,
        "video_token_id": vision.video_token,
        "vision_start_token_id": vision.start_token,
        "vision_end_token_id": vision.end_token,
    }
    for name, token in tokens.items():
        if token is not None and token >= vocab_size:
            violations.append(f"{name} {token} is not in the vocabulary of {vocab_size}")
    if vision.video_token == vision.image_token:
        violations.append(f"video_token_id {vision.video_token} is also the image_token_id")
    return violations


def _find_routing_contradictions(moe: MoE) -> list[str]:
    violations = []
    if moe.topk > moe.num_experts:
        violations.append(f"num_experts_per_tok {moe.topk} exceeds the {moe.num_experts} experts")
    if moe.score_function == "softmax" and not moe.pre_softmax and moe.topk == 1:
        violations.append(
            "num_experts_per_tok is 1 with norm_topk_prob: the weight of that expert would always be 1"
        )
    if moe.groups and moe.group_topk:
        if moe.num_experts % moe.groups:
            violations.append(f"{moe.num_experts} experts do not divide into n_group {moe.groups}")
        elif moe.topk > moe.group_topk * (moe.num_experts // moe.groups):
            violations.append(
                f"num_experts_per_tok {moe.topk} exceeds the experts of topk_group {moe.group_topk} groups"
            )
        elif moe.num_experts // moe.groups < moe.group_score_topk:
            violations.append(
                f"n_group {moe.groups}: a group is scored by its best {moe.group_score_topk} experts, but"
                f" has only {moe.num_experts // moe.groups}"
            )
        if moe.group_topk > moe.groups:
            violations.append(f"topk_group {moe.group_topk} exceeds n_group {moe.groups}")
    return violations
