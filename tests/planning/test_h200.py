"""Predicted names, shapes and bytes against what an H200 with Transformer Engine allocated."""

import json
from pathlib import Path

import pytest
from packaging.version import Version

from bundle.capabilities.cuda import CUDA, TRANSFORMER_ENGINE_LAYER_TRAITS
from bundle.environment.packages import MegatronCode
from bundle.planning.activations import LayerByteCounter, estimate_activations
from bundle.planning.layout import build_rank_layout
from bundle.planning.memory import StateBuffers
from bundle.planning.size import list_parameters
from tests.planning.jobs import job

RECORDED = json.loads((Path(__file__).parent / "fixtures/h200.json").read_text())
RELEASE = MegatronCode(Version("0.16.1"))

_BASE = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "max_position_embeddings": 8192,
}
_LATENT = _BASE | {
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 768,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}


def recipe(model, layers, recompute=None):
    if model == "gqa":
        config = _BASE | {"model_type": "qwen3", "num_key_value_heads": 4, "head_dim": 128}
    else:
        experts = model == "moe"
        config = _LATENT | {
            "first_k_dense_replace": 1 if experts else layers,
            "num_nextn_predict_layers": int(experts),
        }
    return job(
        config | {"num_hidden_layers": layers},
        model={"config": config | {"num_hidden_layers": layers}, "recompute": recompute, "dtype": "bf16"},
        data={"sequence_length": 2048},
        train={"micro_batch_size": 2, "global_batch_size": 2},
    )


@pytest.mark.parametrize("model", ["gqa", "mla", "moe"])
def test_names_and_shapes_of_transformer_engine_layers(model):
    of = recipe(model, 4)
    (chunk,) = build_rank_layout(of, 1).stages[0]
    expected = [
        (tensor.name.replace("mtp_model_layer", "transformer_layer"), list(tensor.shape))
        for tensor in list_parameters(of.architecture, of.parallel, chunk, TRANSFORMER_ENGINE_LAYER_TRAITS)
    ]
    assert expected == [(name, shape) for name, shape in RECORDED["parameters"][model]]


@pytest.mark.parametrize(
    "case", RECORDED["measured"], ids=lambda c: f"{c['model']}-{c['layers']}-{c['recompute']}"
)
def test_bytes(case):
    of = recipe(case["model"], case["layers"], case["recompute"])
    layout = build_rank_layout(of, 1)
    states = StateBuffers.from_recipe(
        of, layout, TRANSFORMER_ENGINE_LAYER_TRAITS, RELEASE
    ).compute_rank_bytes(0)
    for name in ("parameters", "gradients", "master", "moments"):
        assert getattr(states, name) == case[name]
    assert states.counters == 0
    predicted = estimate_activations(of, layout, 0, TRANSFORMER_ENGINE_LAYER_TRAITS, RELEASE)
    # A recomputed MoE layer frees a little more than its own modules; all else agrees to a per mille.
    tolerance = 0.07 if case["recompute"] == {"granularity": "selective", "modules": ["moe"]} else 0.002
    assert predicted.saved == pytest.approx(case["held"], rel=tolerance)
    assert predicted.total_peak == pytest.approx(case["peak"], rel=tolerance)


@pytest.mark.parametrize(("tokens", "gib"), [(2048, 4.1), (4096, 16.2), (8192, 64.4)])
def test_deterministic_attention_of_packs(tokens, gib):
    heads = _BASE | {
        "model_type": "qwen3",
        "num_key_value_heads": 16,
        "head_dim": 128,
        "num_hidden_layers": 2,
    }
    taken = []
    for deterministic in (False, True):
        deterministic_job = job(
            heads,
            data={"packed": True, "sequence_length": tokens},
            train={"deterministic": deterministic, "micro_batch_size": 1, "global_batch_size": 1},
        )
        traits = CUDA.choose_layer_traits(deterministic_job, "9.0")
        assert traits.fused_loss is not deterministic
        taken.append(LayerByteCounter(deterministic_job, traits, RELEASE).workspace_bytes)
    assert taken[0] == 0 and taken[1] == pytest.approx(gib * 2**30, rel=0.03)
