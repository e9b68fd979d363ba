"""What the sections must agree on, layouts, and features."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle.errors import UsageError
from bundle.recipe import Parallel, from_mapping, load
from tests.vision.cases import CASES

LAYOUT = "parallel.pipeline_model_parallel_layout"
APART = [
    "parallel={pp: 4, pipeline_model_parallel_layout: Et|tt|tm|L}",
    "devices.per_node=4",
    "train.global_batch_size=32",
]
BROKEN = [
    ("qwen3-tp2-sp", ["parallel.tp=4"], "parallel.tp: 4 does not divide num_key_value_heads 2"),
    ("qwen3-tp2-sp", ["parallel.tp=1"], "needs tp > 1"),
    ("demo", ["profile={steps: [4, 3]}"], "profile.steps: [4, 3] is no stretch of the steps 1 to"),
    ("demo", ["profile={steps: [1, 100000]}"], "is no stretch of the steps 1 to"),
    ("qwen3-tp2-sp", ["data.sequence_length=127"], "multiple of 2, as tp 2 (sequence parallel) needs it"),
    ("qwen3-tp2-sp", ["parallel.ep=2"], "but the model has none"),
    ("qwen3-tp2-sp", ["parallel.etp=1"], "but the model has none"),
    ("qwen3-tp2-sp", ["model.router_replay=true"], "but the model has none"),
    ("qwen3-tp2-sp", ["model.moe.aux_loss_coeff=0.1"], "but the model has none"),
    ("qwen3-tp2-sp", ["model.moe.z_loss_coeff=0.1"], "but the model has none"),
    ("demo", ["model.moe.z_loss_coeff=-0.1"], "0"),
    ("demo", ["model.vision.freeze_tower=true"], "model.vision.freeze_tower: the model has no vision tower"),
    ("demo", ["model.vision.projector_lr=0.1"], "model.vision.projector_lr: the model has no vision tower"),
    ("qwen3-cp2-packed", ["data.sequence_length=510"], "multiple of 4, as cp 2 needs it"),
    ("qwen3-cp2-packed", ["train.micro_batch_size=2"], "must be 1"),
    ("qwen3-pp2-vpp2", ["parallel.vpp=1"], "use null"),
    ("qwen3-pp2-vpp2", ["parallel.pp=1"], "needs pp > 1"),
    ("qwen3-pp2-vpp2", ["parallel.vpp=4"], "pp x vpp = 8 does not divide"),
    (
        "qwen3-pp2-vpp2",
        ["model.config.num_hidden_layers=6"],
        "divide num_hidden_layers 6: parallel.num_layers_in_last_pipeline_stage: 2 makes the others equal",
    ),
    (
        "qwen3-pp2-vpp2",
        ["parallel.num_layers_in_first_pipeline_stage=1"],
        "num_layers_in_first_pipeline_stage: 1 in the first of 2 stages of 2 chunks leave 3 to the other 1",
    ),
    (
        "qwen3-tp2-sp",
        ["model.moe.bias_update_rate=0.5"],
        "bias_update_rate: balances experts, but the model has",
    ),
    (
        "demo",
        ["model.recompute={granularity: selective, modules: [mlp]}", "model.config.first_k_dense_replace=0"],
        "mlp, but the model has no dense layers",
    ),
    (
        "demo",
        [
            "model.recompute={granularity: selective, modules: [shared_experts]}",
            "model.config.n_shared_experts=0",
        ],
        "shared_experts, but the model has none",
    ),
    ("demo", ["data.date=2025-02-03"], "data.date: a chat template alone writes it"),
    (
        "demo",
        ["data.date=2025-02-31", "data.template=chat", "data.tokenizer=hf:x"],
        "data.date: 2025-02-31: day is out of range",
    ),
    ("demo", ["parallel.num_layers_in_last_pipeline_stage=1"], "there is one stage: needs pp > 1"),
    ("demo", ["parallel.pipeline_model_parallel_layout=EttttmL"], "there is one stage: needs pp > 1"),
    ("qwen3-pp2-vpp2", [f"{LAYOUT}=Et|x"], f"{LAYOUT}: from character 4 on, 'x', it is no layout"),
    ("qwen3-pp2-vpp2", [f"{LAYOUT}=E|t|t|tL"], f"{LAYOUT}: 3 layers of the decoder (t), and the model has 4"),
    ("qwen3-pp2-vpp2", [f"{LAYOUT}=Ett|ttL"], "parallel.vpp: 2, and"),
    (
        "qwen3-pp2-vpp2",
        [f"{LAYOUT}=E|t|t|t|t|L", "parallel.pp=4", "parallel.vpp=null"],
        "6 stages are no multiple of pp 4",
    ),
    (
        "qwen3-pp2-vpp2",
        [f"{LAYOUT}=Et|t|t|tL", "parallel.num_layers_in_first_pipeline_stage=2"],
        f"num_layers_in_first_pipeline_stage: {LAYOUT} says what every stage holds: leave one of them out",
    ),
    (
        "qwen3-pp2-vpp2",
        [f"{LAYOUT}=Et|t|t|tL", "parallel.num_layers_in_last_pipeline_stage=2"],
        f"num_layers_in_last_pipeline_stage: {LAYOUT} says what every stage holds: leave one of them out",
    ),
    ("demo", [*APART, "model.config.tie_word_embeddings=true"], "cannot build a tied head"),
    ("demo", [*APART, "model.mtp.detach_embeddings=true"], "model.mtp.detach_embeddings: is not computed"),
    (
        "demo",
        [*APART, "model.recompute={granularity: full, method: block, layers: 3}"],
        "3 exceeds the 2 layers of a stage",
    ),
    ("demo", ["parallel.tp=2", "parallel.sequence_parallel=false"], "megatron-core refuses"),
    (
        "demo",
        [
            "parallel={tp: 2, sequence_parallel: false}",
            "model.config.first_k_dense_replace=4",
            "model.mtp.layers=0",
        ],
        "gradient of rotary keys",
    ),
    ("demo", ["parallel.etp=3"], "does not divide moe_intermediate_size"),
    ("demo", ["model.config.vocab_size=257"], "at least 258"),
    ("demo", ["model.mtp.detach_trunk=true", "model.mtp.layers=0"], "no MTP layers"),
    ("demo", ["data.template=chat"], "no chat template"),
    ("demo", ["optimizer.min_lr=1.0"], "exceeds lr"),
    ("demo", ["optimizer.warmup_steps=300"], "leaves nothing"),
    ("demo", ["optimizer.betas=[0.9, 1.0]"], "below 1"),
    ("demo", ["optimizer.schedule=WSD"], "wsd_decay_steps: WSD falls in its last steps: say in how many"),
    (
        "demo",
        ["optimizer={schedule: WSD, warmup_steps: 5, wsd_decay_steps: 296}"],
        "296 and 5 of the warm-up are more than 300",
    ),
    ("demo", ["optimizer.wsd_decay_steps=20"], "belongs to schedule WSD"),
    ("demo", ["optimizer.wsd_decay_style=linear"], "belongs to schedule WSD"),
    ("demo", ["optimizer={name: sgd, use_distributed_optimizer: true}"], "divides the state of adam alone"),
    ("demo", ["optimizer={name: sgd, sgd_momentum: 1}"], "must be less than 1"),
    (
        "demo",
        [
            "optimizer={use_distributed_optimizer: false}",
            "distributed={overlap_grad_reduce: true, overlap_param_gather: true}",
        ],
        "gathers what optimizer.use_distributed_optimizer divides",
    ),
    (
        "demo",
        ["optimizer.use_precision_aware_optimizer=true"],
        "beside those in bf16: needs model.dtype bf16",
    ),
    (
        "demo",
        ["model.dtype=bf16", "optimizer={name: sgd, use_precision_aware_optimizer: true}"],
        "for adam with use_distributed_optimizer: true alone",
    ),
    ("demo", ["optimizer.exp_avg_dtype=bf16"], "exp_avg_dtype: belongs to use_precision_aware_optimizer"),
    (
        "demo",
        ["optimizer.optimizer_cpu_offload=true"],
        "only with optimizer.use_precision_aware_optimizer: set that true",
    ),
    (
        "demo",
        [
            "model.dtype=bf16",
            "optimizer={use_precision_aware_optimizer: true, optimizer_cpu_offload: true}",
            "optimizer.exp_avg_sq_dtype=bf16",
        ],
        "exp_avg_sq_dtype: the host's Adam keeps all in fp32",
    ),
    ("demo", ["optimizer.optimizer_offload_fraction=0.5"], "belongs to optimizer_cpu_offload: set that true"),
    ("demo", ["train.early_stop={patience: 2}", "data.validation=0"], "data.validation 0 makes none"),
    ("demo", ["train.early_stop={patience: 2}", "train.eval_interval=0"], "train.eval_interval 0 makes none"),
    ("demo", ["distributed.overlap_param_gather=true"], "overlap_grad_reduce"),
    ("demo", ["train.global_batch_size=12"], "not a multiple of micro_batch_size 8"),
    ("demo", ["devices.per_node=3"], "multiple of 2 ranks"),
    ("demo", ["devices.per_node=4"], "micro_batch_size x dp = 8 x 4; the next is 32"),
    ("demo", ["model.recompute={granularity: selective, layers: 2}"], "belongs to granularity full"),
    ("demo", ["model.recompute={granularity: selective, modules: [attn]}"], "unknown: attn"),
    ("demo", ["model.recompute={granularity: full, modules: [mlp]}"], "knows no modules"),
    ("demo", ["model.recompute={granularity: full, layers: 5}"], "exceeds the 4 layers"),
    ("qwen3-tp2-sp", ["model.recompute={granularity: selective, modules: [moe]}"], "no experts"),
    ("qwen3-tp2-sp", ["model.recompute={granularity: selective, modules: [mla_up_proj]}"], "no latent"),
]


@pytest.mark.parametrize(("name", "overrides", "named"), BROKEN)
def test_each_broken_rule_is_named_once(name, overrides, named):
    with pytest.raises(UsageError) as caught:
        load(name, overrides)
    assert len(caught.value.violations) == 1 and named in caught.value.violations[0]


def test_an_early_stop_looks_at_validation_sets_where_nothing_is_held_out():
    sets = "data.validation_sets={own: {path: [own.txt]}}"
    assert load("demo", ["train.early_stop={patience: 2}", "data.validation=0", sets]).train.early_stop


def test_an_interleaved_pipeline_needs_micro_batches_in_multiples_of_its_stages():
    recipe = load("qwen3-pp2-vpp2", ["train.global_batch_size=6"])
    (violation,) = recipe.find_layout_violations(2)
    assert "multiple of pp 2" in violation


SIZE = st.integers(1, 6)


@given(tp=SIZE, pp=SIZE, cp=SIZE, ep=SIZE, etp=SIZE, times=SIZE)
def test_a_world_fits_exactly_when_both_views_of_a_stage_divide(tp, pp, cp, ep, etp, times):
    parallel = Parallel(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)
    for world in (parallel.minimal_world * times, parallel.minimal_world * times + pp):
        divides = world % (pp * tp * cp) == 0 and world % (pp * etp * ep) == 0
        assert parallel.fits(world) == divides
    world = parallel.minimal_world * times
    assert (
        parallel.compute_dp(world) * tp * cp * pp
        == world
        == parallel.compute_expert_dp(world) * etp * ep * pp
    )
    assert (
        math.gcd(
            parallel.compute_dp(parallel.minimal_world), parallel.compute_expert_dp(parallel.minimal_world)
        )
        == 1
    )


def test_features_name_what_patches_ask_for():
    demo = load("demo").features
    assert {"mla", "moe", "mtp", "ep", "dp", "unequal-head-dims", "expert-bias", "attention-auto"} <= demo
    assert not demo & {"packed", "cp", "tp", "sp", "pp", "vpp", "gqa", "mtp-detached", "fp8", "etp-unlike-tp"}
    assert {"packed", "cp", "gqa"} <= load("qwen3-cp2-packed").features
    assert {"tp", "sp"} <= load("qwen3-tp2-sp").features
    assert {"pp", "vpp"} <= load("qwen3-pp2-vpp2").features
    words = ["model.mtp.detach_trunk=true", "model.recompute={granularity: selective}", "parallel.tp=2"]
    changed = load("demo", words)
    assert {"mtp-detached", "recompute-selective", "tp", "sp"} <= changed.features
    assert "etp-unlike-tp" not in changed.features
    assert "etp-unlike-tp" in load("demo", [*words, "parallel.etp=1"]).features
    assert "etp-unlike-tp" in load("demo", ["parallel={etp: 2, ep: 1}"]).features
    assert "mtp" not in load("demo", ["model.mtp.layers=0"]).features


SEEING: dict[str, Any] = {
    "name": "seeing",
    "task": "sft",
    "model": {"config": CASES[0].config},
    "data": {
        "source": "jsonl",
        "path": ["rows.jsonl"],
        "sequence_length": 64,
        "tokenizer": "hf:DIR",
        "template": "chat",
    },
    "train": {"steps": 1, "global_batch_size": 1},
    "optimizer": {"warmup_steps": 0},
}


@pytest.mark.parametrize(
    ("section", "change", "reason"),
    [
        ("model", {"fp8": {"scaling": "delayed"}}, "model.fp8: FP8 products are not computed"),
        ("model", {"mtp": {"layers": 1}}, "model.mtp.layers: multi-token prediction is not computed"),
        ("data", {"template": "plain"}, "data.template: images and videos come in conversations"),
        (
            "model",
            {"lora": {"rank": 2, "alpha": 4.0, "targets": ["q_proj"]}, "vision": {"tower_lr": 0.1}},
            "model.vision.tower_lr: beside adapters all weights are frozen",
        ),
        (
            "model",
            {"lora": {"rank": 2, "alpha": 4.0, "targets": ["patch_embed.proj"]}},
            "no projection is called patch_embed.proj",
        ),
    ],
)
def test_what_is_not_computed_beside_a_vision_tower_is_named(section, change, reason):
    assert {"mrope", "multimodal"} <= from_mapping(SEEING).features
    with pytest.raises(UsageError) as refused:
        from_mapping(SEEING | {section: SEEING[section] | change})
    assert reason in " ".join(refused.value.violations)


@pytest.mark.parametrize("part", ["tower", "projector"])
def test_what_is_frozen_has_no_learning_rate(part):
    vision = {f"freeze_{part}": True, f"{part}_lr": 0.1}
    with pytest.raises(UsageError) as refused:
        from_mapping(SEEING | {"model": SEEING["model"] | {"vision": vision}})
    assert f"model.vision.{part}_lr: what is frozen has no" in " ".join(refused.value.violations)


@pytest.mark.parametrize(("layout", "vpp"), [("Ett|ttL", None), ("Et|t|t|tL", 2), ("E|t|t|t|t|L", 3)])
def test_a_layout_says_how_many_chunks_there_are(layout, vpp):
    for more in ({}, {"vpp": None}, {"vpp": vpp}):
        parallel = Parallel.model_validate({"pp": 2, "pipeline_model_parallel_layout": layout} | more)
        assert parallel.vpp == vpp


def test_the_rules_ask_what_the_first_chunk_of_a_layout_holds():
    deep = next(case for case in CASES if len(case.vision.deepstack) == 2)  # and four decoder layers
    job = SEEING | {"model": {"config": deep.config}}
    for layout, pp, has in (("Ett|ttL", 2, 2), ("Et|t|t|tL", 2, 1), ("E|tttt|L", 3, 0)):
        parallel = {"pp": pp, "pipeline_model_parallel_layout": layout}
        if has == 2:
            assert from_mapping(job | {"parallel": parallel})
            continue
        said = f"_layout: the tower gives .* first stage has {has} of them: give it more \\(t before its"
        with pytest.raises(UsageError, match=said):
            from_mapping(job | {"parallel": parallel})


def test_a_layout_without_stages_is_blamed_alone():
    with pytest.raises(UsageError) as error:
        load("demo", ["parallel={pipeline_model_parallel_layout: Ett|ttmL}"])
    (violation,) = error.value.violations
    assert violation.endswith(f"{LAYOUT}: there is one stage: needs pp > 1")


def test_layers_that_a_tower_gives_something_for_are_on_the_first_stage():
    deep = next(case for case in CASES if len(case.vision.deepstack) == 2)  # and four decoder layers
    job = SEEING | {"model": {"config": deep.config}}
    assert from_mapping(job | {"parallel": {"pp": 2}})
    for parallel in ({"pp": 4}, {"pp": 2, "vpp": 2}):
        with pytest.raises(UsageError, match="for the first 2 decoder layers, and the first stage has 1"):
            from_mapping(job | {"parallel": parallel})
