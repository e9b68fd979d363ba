"""Every field that a family reads is held by the plain models, refused, or named here as without effect.

Models with gated delta nets have no plain one: tests/families holds them against transformers' own class,
which shows here what a field does.
"""

import copy
import functools
import zlib
from typing import Any

import pytest
import torch

from bundle.architectures import from_config
from bundle.architectures.config import ROPE_KINDS, ConfigKeys
from bundle.architectures.families import FAMILIES
from bundle.errors import UsageError
from tests.families.cases import CASES
from tests.families.record import note
from tests.reference import model, rotary
from tests.reference.configs import CONFIGS, Config
from tests.reference.weights import drawn
from tools.models import EVERY

OF_TRANSFORMERS: dict[str, Config] = {case.name: case.config for case in CASES if case.linear}
ALL = CONFIGS | OF_TRANSFORMERS
# What a field has where nobody thinks of it: no config here has it, so that forgetting the field shows.
USUAL: Config = {
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_qk_norm": False,
    "num_local_experts": 12,
    "num_experts": 12,
    "n_routed_experts": 12,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "n_shared_experts": 0,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 2,
    "topk_group": 3,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_nextn_predict_layers": 0,
    "swiglu_limit": 7.0,
    "sliding_window": 128,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 24,
    "rope_scaling": None,
    "rope_parameters": {"rope_type": "default"},
}
# A family either refuses these values or lets the field choose, and then it is held like the others.
REFUSABLE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu",),
    "mlp_bias": (True,),
    "layer_types": (["sliding_attention"],),
    "sliding_window": (8,),
    "use_sliding_window": (True,),
    "swiglu_alpha": (1.0,),
    "experts_per_token": (5,),
    "initial_context_length": (7,),
    "attention_bias": (True, False),
    "use_mrope": (True,),
    "router_jitter_noise": (0.1,),
    "scoring_func": ("other",),
    "topk_method": ("other",),
    "norm_topk_prob": (True, False),
    "rope_interleave": (False,),
    "qk_head_dim": (7,),
    "head_dim": (7,),
    "num_key_value_heads": (1,),
    "partial_rotary_factor": (0.5,),
    "attn_output_gate": (False,),
    "output_gate_type": ("sigmoid",),
    "mlp_only_layers": ([0],),
}
SWITCHES: dict[str, Config] = {
    "sliding_window": {"use_sliding_window": True},
    "use_sliding_window": {"sliding_window": 8},
}
WITHOUT_EFFECT = {
    "max_position_embeddings": "a bound, not a number that anything is computed from",
    "initializer_range": "the weights are given",
    "attention_dropout": "random: tests/checkpoints holds it",
    "router_aux_loss_coef": "balancing has an oracle of its own",
    "output_router_logits": "balancing has an oracle of its own",
    "aux_loss_alpha": "balancing has an oracle of its own",
    "seq_aux": "balancing has an oracle of its own",
    "mamba_ssm_dtype": "of what servers keep; states are in float32",
    "mtp_num_hidden_layers": "left out, as transformers does: tests/models/test_delta_nets.py",
    "mtp_use_dedicated_embeddings": "left out, as transformers does: tests/models/test_delta_nets.py",
}


def own(family: str) -> dict[str, Config]:
    return {name: config for name, config in ALL.items() if config["model_type"] == family}


def taken(config: Config) -> set[str]:
    """The fields that the family's reader asks for."""
    keys = ConfigKeys(config)
    FAMILIES[config["model_type"]](keys)
    return keys._read_names


def is_refused(changed: Config, *fields: str) -> bool:
    """Whether the reader refuses this config, and names one of the fields."""
    try:
        from_config(changed)
    except UsageError as error:
        return any(f"{field} " in str(error) for field in fields)
    return False


def is_refusable(config: Config, field: str) -> bool:
    switches = SWITCHES.get(field, {})
    values = REFUSABLE.get(field, ())
    return any(is_refused(config | switches | {field: value}, field, *switches) for value in values)


def logits(config: Config) -> torch.Tensor:
    ids = torch.randint(1, 60, (29,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        if config["model_type"] in {config["model_type"] for config in OF_TRANSFORMERS.values()}:
            return of_transformers(config, ids)
        heads = model.heads(config, drawn(config, seed=2), ids)
    return torch.stack(heads)


def of_transformers(config: Config, ids: torch.Tensor) -> torch.Tensor:
    """Logits of its own class, whose weights are drawn by their names."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    settings = transformers.AutoConfig.for_model(**copy.deepcopy(config))  # it writes into what it is given
    theirs = transformers.AutoModelForCausalLM.from_config(
        settings, dtype=torch.float32, attn_implementation="eager"
    )
    for name, parameter in theirs.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    found: torch.Tensor = theirs.eval()(ids[None]).logits[0]
    return found


@functools.cache
def held(name: str) -> torch.Tensor:
    return logits(ALL[name])


def moves(name: str, changes: Config) -> bool:
    """Whether the change shows far above what engines may be off; one that cannot be shows nothing."""
    if name in OF_TRANSFORMERS and is_refused(ALL[name] | changes, ""):
        return False
    seen, before = logits(ALL[name] | changes), held(name)
    if seen.shape != before.shape:
        return True
    return bool((seen - before).abs().max() > 1e-3 * before.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_is_held(family):
    configs = own(family)
    assert configs
    fields = set[str]().union(*map(taken, configs.values()))
    forgotten = {
        field
        for field in fields - WITHOUT_EFFECT.keys()
        if not any(is_refusable(config, field) for config in configs.values())
        and not any(
            field in config and field in USUAL and moves(name, {field: USUAL[field]})
            for name, config in configs.items()
        )
    }
    # Stretched positions are read by one reader for all families: below.
    assert forgotten <= {"rope_scaling", "rope_parameters"}
    note(EVERY, "config", {family: 0.0})


@pytest.mark.parametrize("kind", [kind for kind in ROPE_KINDS if kind != "default"])
def test_every_field_of_stretched_positions_is_held(monkeypatch, kind):
    sections = {
        name: "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        for name, config in CONFIGS.items()
        if rotary.settings(config)["kind"] == kind
    }
    readers: list[ConfigKeys] = []

    def reader(section: Config) -> ConfigKeys:
        readers.append(ConfigKeys(section))
        return readers[-1]

    with monkeypatch.context() as patched:
        patched.setattr("bundle.architectures.config.ConfigKeys", reader)
        for name in sections:
            from_config(CONFIGS[name])
    fields = set[str]().union(*(keys._read_names for keys in readers)) - {"rope_type", "type"}

    def is_held(field: str, name: str, section: str) -> bool:
        given = CONFIGS[name][section]
        if field not in given:
            return is_refused(CONFIGS[name] | {section: given | {field: 0.5}}, field)
        other = not given[field] if isinstance(given[field], bool) else given[field] / 4
        return moves(name, {section: given | {field: other}})

    assert sections
    assert not {field for field in fields if not any(is_held(field, *where) for where in sections.items())}
