"""Map our modules to the names under which each family publishes its tensors in Hugging Face directories.

On the left stands a module of a decoder layer, of an MTP layer or of the model as megatron-core's own specs
call it. On the right stands the published one. `{a,b}` are several modules that ours is made of, in that
order; `#` is an expert's number.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

_NON_LAYER_MODULE_NAMES = {
    "embedding.word_embeddings": "{decoder}embed_tokens",
    "decoder.final_layernorm": "{decoder}norm",
    "output_layer": "lm_head",
}
_LAYER_NAMES = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.linear_qkv": "self_attn.{q,k,v}_proj",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.{gate,up}_proj",
    "mlp.linear_fc2": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.experts.local_experts.#.linear_fc1": "mlp.experts.#.{gate,up}_proj",
    "mlp.experts.local_experts.#.linear_fc2": "mlp.experts.#.down_proj",
    "mlp.shared_experts.linear_fc1": "mlp.shared_experts.{gate,up}_proj",
    "mlp.shared_experts.linear_fc2": "mlp.shared_experts.down_proj",
}
_MIXTRAL_NAME_OVERRIDES = {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.local_experts.#.linear_fc1": "block_sparse_moe.experts.#.{w1,w3}",
    "mlp.experts.local_experts.#.linear_fc2": "block_sparse_moe.experts.#.w2",
}
_GPT_OSS_NAME_OVERRIDES = {
    "self_attention.core_attention": "self_attn",
    "mlp.router": "mlp.router",
}
_HYBRID_NAMES = {
    "self_attention": "linear_attn",
    "self_attention.conv1d": "linear_attn.conv1d",
    "self_attention.out_norm": "linear_attn.norm",
    "self_attention.out_proj": "linear_attn.out_proj",
    "mlp.shared_experts": "mlp.shared_expert_gate",
    "mlp.shared_experts.linear_fc1": "mlp.shared_expert.{gate,up}_proj",
    "mlp.shared_experts.linear_fc2": "mlp.shared_expert.down_proj",
}
_FUSED_DELTA_NET_NAMES = {"self_attention.in_proj": "linear_attn.in_proj_{qkvz,ba}"}
_SPLIT_DELTA_NET_NAMES = {"self_attention.in_proj": "linear_attn.in_proj_{qkv,z,b,a}"}
_STACKED_EXPERT_NAMES = {
    "mlp.experts.local_experts.#.linear_fc1": "mlp.experts.gate_up_proj",
    "mlp.experts.local_experts.#.linear_fc2": "mlp.experts.down_proj",
}
_NAME_BY_LATENT_MODULE = {
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.q_layernorm": "self_attn.q_a_layernorm",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
}


@dataclass(frozen=True, slots=True)
class MTPNames:
    """A family's names of an MTP layer's modules; `outer_modules` are those beside its decoder layer."""

    prefix: str  # where it stands; by `depth`, and by `layer`, which counts on after the decoder's
    outer_modules: Mapping[str, str]
    copies: Mapping[str, str] = field(default_factory=dict)  # of other tensors: its module -> the original
    is_hidden_first: bool = False  # eh_proj reads [hidden, embedding]; megatron's reads [embedding, hidden]


@dataclass(frozen=True, slots=True)
class PublishedNames:
    """A family's names of the modules of a decoder layer and, if it publishes any, of its MTP layers.

    `decoder_prefix` begins all names of the decoder, `vision_prefix` those of the tower. `config_defaults`
    are keys of published configs that transformers' own may leave out; servers (SGLang) read them.
    """

    architecture: str  # what configs name in `architectures`: the class of transformers, or of the repository
    layer_modules: Mapping[str, str] = field(default_factory=lambda: _LAYER_NAMES)
    mtp: MTPNames | None = None
    decoder_prefix: str = "model."
    vision_prefix: str = ""
    config_defaults: Mapping[str, Any] = field(default_factory=dict)
    # Prefixes of published names -> those of transformers' modules, where they differ; PEFT uses the latter.
    transformers_prefixes: Mapping[str, str] = field(default_factory=dict)
    # One tensor for a layer's experts, [expert, in, out], with gate and up in turns or as in ours (copy);
    # no program loads it in FP8 blocks.
    stacked_experts: Literal["turns", "copy"] | None = None
    has_both_stack_orders: bool = False  # some publish [expert, out, in]; both are read
    ignored_prefix: str = ""  # the prefix of published tensors that are not read here
    # The first projection of gated delta nets is two, each head by head of the keys.
    has_key_head_order: bool = False

    def find_non_layer_module(self, module: str) -> str:
        """Return the published name of a module outside all layers."""
        return _NON_LAYER_MODULE_NAMES[module].format(decoder=self.decoder_prefix)

    def to_transformers_name(self, name: str) -> str:
        """Return transformers' own name of the published `name`."""
        for published, module in self.transformers_prefixes.items():
            if name.startswith(published):
                return f"{module}{name.removeprefix(published)}"
        return name

    def list_layer_module_parts(self, module: str) -> tuple[str, ...]:
        """Return the published modules that a decoder layer's module is made of."""
        number = re.search(r"(?<=local_experts\.)\d+", module)
        if number is None:
            return _expand_pattern(self.layer_modules[module])
        key = f"{module[: number.start()]}#{module[number.end() :]}"
        return _expand_pattern(self.layer_modules[key].replace("#", number[0]))


def build_suffix(kind: str, *, stacked: bool) -> str:
    """Return the end of a published name, behind its module, for a kind of tensor such as weight."""
    if stacked:
        return "" if kind == "weight" else f"_{kind}"
    return f".{_DEVIATING_SUFFIX_BY_KIND.get(kind, kind)}"


_DEVIATING_SUFFIX_BY_KIND = {
    "expert_bias": "e_score_correction_bias",
    "softmax_offset": "sinks",
    "gate_weight": "weight",
}


def _expand_pattern(pattern: str) -> tuple[str, ...]:
    """Return the names that a pattern means: "a{b,c}d" -> ("abd", "acd")."""
    before, brace, rest = pattern.partition("{")
    if not brace:
        return (pattern,)
    choices, _, after = rest.partition("}")
    return tuple(f"{before}{choice}{after}" for choice in choices.split(","))


_DEEPSEEK_MTP = MTPNames(
    prefix="model.layers.{layer}.",
    outer_modules={
        "enorm": "enorm",
        "hnorm": "hnorm",
        "eh_proj": "eh_proj",
        "final_layernorm": "shared_head.norm",
    },
    copies={"embed_tokens": "embedding.word_embeddings", "shared_head.head": "output_layer"},
)
_MIMO_MTP = MTPNames(
    prefix="model.mtp_layers.{depth}.",
    outer_modules={
        "enorm": "token_layernorm",
        "hnorm": "hidden_layernorm",
        "eh_proj": "input_proj",
        "final_layernorm": "final_layernorm",
    },
    is_hidden_first=True,
)
_NOAUX_TC_DEFAULTS = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}

PUBLISHED_NAMES: dict[str, PublishedNames] = {
    "llama": PublishedNames("LlamaForCausalLM"),
    "mistral": PublishedNames("MistralForCausalLM"),
    "mixtral": PublishedNames("MixtralForCausalLM", _LAYER_NAMES | _MIXTRAL_NAME_OVERRIDES),
    "qwen2": PublishedNames("Qwen2ForCausalLM"),
    "mimo": PublishedNames("MiMoForCausalLM", mtp=_MIMO_MTP),
    "qwen3": PublishedNames("Qwen3ForCausalLM"),
    "qwen3_moe": PublishedNames("Qwen3MoeForCausalLM"),
    "deepseek_v2": PublishedNames(
        "DeepseekV2ForCausalLM",
        _LAYER_NAMES | _NAME_BY_LATENT_MODULE,
        config_defaults={"moe_layer_freq": 1, "scoring_func": "softmax", "topk_method": "greedy"},
    ),
    "deepseek_v3": PublishedNames(
        "DeepseekV3ForCausalLM",
        _LAYER_NAMES | _NAME_BY_LATENT_MODULE,
        _DEEPSEEK_MTP,
        config_defaults=_NOAUX_TC_DEFAULTS,
    ),
    "kimi_k2": PublishedNames(
        "DeepseekV3ForCausalLM",
        _LAYER_NAMES | _NAME_BY_LATENT_MODULE,
        _DEEPSEEK_MTP,
        config_defaults=_NOAUX_TC_DEFAULTS,
    ),
    "glm4_moe": PublishedNames("Glm4MoeForCausalLM", mtp=_DEEPSEEK_MTP),
    "gpt_oss": PublishedNames(
        "GptOssForCausalLM",
        _LAYER_NAMES | _STACKED_EXPERT_NAMES | _GPT_OSS_NAME_OVERRIDES,
        stacked_experts="turns",
    ),
    "qwen3_next": PublishedNames(
        "Qwen3NextForCausalLM",
        _LAYER_NAMES | _HYBRID_NAMES | _FUSED_DELTA_NET_NAMES,
        ignored_prefix="mtp.",
        has_key_head_order=True,
    ),
    "qwen3_5_text": PublishedNames(
        "Qwen3_5ForCausalLM",
        _LAYER_NAMES | _HYBRID_NAMES | _SPLIT_DELTA_NET_NAMES,
        ignored_prefix="mtp.",
    ),
    "qwen3_5_moe_text": PublishedNames(
        "Qwen3_5MoeForCausalLM",
        _LAYER_NAMES | _HYBRID_NAMES | _SPLIT_DELTA_NET_NAMES,
        ignored_prefix="mtp.",
    ),
    "qwen2_5_vl": PublishedNames(
        "Qwen2_5_VLForConditionalGeneration",
        vision_prefix="visual.",
        transformers_prefixes={"model.": "model.language_model.", "visual.": "model.visual."},
    ),
    "qwen3_vl": PublishedNames(
        "Qwen3VLForConditionalGeneration",
        decoder_prefix="model.language_model.",
        vision_prefix="model.visual.",
    ),
    "qwen3_vl_moe": PublishedNames(
        "Qwen3VLMoeForConditionalGeneration",
        _LAYER_NAMES | _STACKED_EXPERT_NAMES,
        decoder_prefix="model.language_model.",
        vision_prefix="model.visual.",
        stacked_experts="copy",
        has_both_stack_orders=True,
    ),
}
