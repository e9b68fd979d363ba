"""What the sections must agree on, layouts, and features."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle.errors import UsageError
from bundle.recipe import Parallel, from_mapping, load
from tests.recipe.violations import collect_violations
from tests.vision.cases import CASES

LAYOUT = "parallel.pipeline_model_parallel_layout"
APART = [
    "parallel={pp: 4, pipeline_model_parallel_layout: Et|tt|tm|L}",
    "devices.per_node=4",
    "train.global_batch_size=32",
]
BROKEN = [
    ("qwen3-tp2-sp", ["parallel.tp=4"], "parallel.tp"),
    ("qwen3-tp2-sp", ["parallel.tp=1"], "parallel.sequence_parallel"),
    ("demo", ["profile={steps: [4, 3]}"], "profile.steps"),
    ("demo", ["profile={steps: [1, 100000]}"], "profile.steps"),
    ("qwen3-tp2-sp", ["data.sequence_length=127"], "data.sequence_length"),
    ("qwen3-tp2-sp", ["parallel.ep=2"], "parallel.ep"),
    ("qwen3-tp2-sp", ["parallel.etp=1"], "parallel.etp"),
    ("qwen3-tp2-sp", ["model.router_replay=true"], "model.router_replay"),
    ("qwen3-tp2-sp", ["model.moe.aux_loss_coeff=0.1"], "model.moe.aux_loss_coeff"),
    ("qwen3-tp2-sp", ["model.moe.z_loss_coeff=0.1"], "model.moe.z_loss_coeff"),
    ("demo", ["model.moe.z_loss_coeff=-0.1"], "model.moe.z_loss_coeff"),
    ("demo", ["model.vision.freeze_tower=true"], "model.vision.freeze_tower"),
    ("demo", ["model.vision.projector_lr=0.1"], "model.vision.projector_lr"),
    ("qwen3-cp2-packed", ["data.sequence_length=510"], "data.sequence_length"),
    ("qwen3-cp2-packed", ["train.micro_batch_size=2"], "train.micro_batch_size"),
    ("qwen3-pp2-vpp2", ["parallel.vpp=1"], "parallel.vpp"),
    ("qwen3-pp2-vpp2", ["parallel.pp=1"], "parallel.vpp"),
    ("qwen3-pp2-vpp2", ["parallel.vpp=4"], "parallel.pp"),
    (
        "qwen3-pp2-vpp2",
        ["model.config.num_hidden_layers=6"],
        "parallel.pp",
    ),
    (
        "qwen3-pp2-vpp2",
        ["parallel.num_layers_in_first_pipeline_stage=1"],
        "parallel.num_layers_in_first_pipeline_stage",
    ),
    (
        "qwen3-tp2-sp",
        ["model.moe.bias_update_rate=0.5"],
        "model.moe.bias_update_rate",
    ),
    (
        "demo",
        ["model.recompute={granularity: selective, modules: [mlp]}", "model.config.first_k_dense_replace=0"],
        "model.recompute.modules",
    ),
    (
        "demo",
        [
            "model.recompute={granularity: selective, modules: [shared_experts]}",
            "model.config.n_shared_experts=0",
        ],
        "model.recompute.modules",
    ),
    ("demo", ["data.date=2025-02-03"], "data.date"),
    ("demo", ["parallel.num_layers_in_last_pipeline_stage=1"], "parallel.num_layers_in_last_pipeline_stage"),
    ("demo", ["parallel.pipeline_model_parallel_layout=EttttmL"], LAYOUT),
    ("qwen3-pp2-vpp2", [f"{LAYOUT}=Et|x"], LAYOUT),
    ("qwen3-pp2-vpp2", [f"{LAYOUT}=E|t|t|tL"], LAYOUT),
    ("qwen3-pp2-vpp2", [f"{LAYOUT}=Ett|ttL"], "parallel.vpp"),
    (
        "qwen3-pp2-vpp2",
        [f"{LAYOUT}=E|t|t|t|t|L", "parallel.pp=4", "parallel.vpp=null"],
        LAYOUT,
    ),
    (
        "qwen3-pp2-vpp2",
        [f"{LAYOUT}=Et|t|t|tL", "parallel.num_layers_in_first_pipeline_stage=2"],
        "parallel.num_layers_in_first_pipeline_stage",
    ),
    (
        "qwen3-pp2-vpp2",
        [f"{LAYOUT}=Et|t|t|tL", "parallel.num_layers_in_last_pipeline_stage=2"],
        "parallel.num_layers_in_last_pipeline_stage",
    ),
    ("demo", [*APART, "model.config.tie_word_embeddings=true"], LAYOUT),
    ("demo", [*APART, "model.mtp.detach_embeddings=true"], "model.mtp.detach_embeddings"),
    (
        "demo",
        [*APART, "model.recompute={granularity: full, method: block, layers: 3}"],
        "model.recompute.layers",
    ),
    ("demo", ["parallel.tp=2", "parallel.sequence_parallel=false"], "parallel.sequence_parallel"),
    (
        "demo",
        [
            "parallel={tp: 2, sequence_parallel: false}",
            "model.config.first_k_dense_replace=4",
            "model.mtp.layers=0",
        ],
        "parallel.sequence_parallel",
    ),
    ("demo", ["parallel.etp=3"], "parallel.etp"),
    ("demo", ["model.config.vocab_size=257"], "data.tokenizer"),
    ("demo", ["model.mtp.detach_trunk=true", "model.mtp.layers=0"], "model.mtp.detach_trunk"),
    ("demo", ["data.template=chat"], "data.template"),
    ("demo", ["optimizer.min_lr=1.0"], "optimizer.min_lr"),
    ("demo", ["optimizer.warmup_steps=300"], "optimizer.warmup_steps"),
    ("demo", ["optimizer.betas=[0.9, 1.0]"], "optimizer.betas"),
    ("demo", ["optimizer.schedule=WSD"], "optimizer.wsd_decay_steps"),
    (
        "demo",
        ["optimizer={schedule: WSD, warmup_steps: 5, wsd_decay_steps: 296}"],
        "optimizer.wsd_decay_steps",
    ),
    ("demo", ["optimizer.wsd_decay_steps=20"], "optimizer.wsd_decay_steps"),
    ("demo", ["optimizer.wsd_decay_style=linear"], "optimizer.wsd_decay_style"),
    (
        "demo",
        ["optimizer={name: sgd, use_distributed_optimizer: true}"],
        "optimizer.use_distributed_optimizer",
    ),
    ("demo", ["optimizer={name: sgd, sgd_momentum: 1}"], "optimizer.sgd_momentum"),
    (
        "demo",
        [
            "optimizer={use_distributed_optimizer: false}",
            "distributed={overlap_grad_reduce: true, overlap_param_gather: true}",
        ],
        "distributed.overlap_param_gather",
    ),
    (
        "demo",
        ["optimizer.use_precision_aware_optimizer=true"],
        "optimizer.use_precision_aware_optimizer",
    ),
    (
        "demo",
        ["model.dtype=bf16", "optimizer={name: sgd, use_precision_aware_optimizer: true}"],
        "optimizer.use_precision_aware_optimizer",
    ),
    ("demo", ["optimizer.exp_avg_dtype=bf16"], "optimizer.exp_avg_dtype"),
    (
        "demo",
        ["optimizer.optimizer_cpu_offload=true"],
        "optimizer.optimizer_cpu_offload",
    ),
    (
        "demo",
        [
            "model.dtype=bf16",
            "optimizer={use_precision_aware_optimizer: true, optimizer_cpu_offload: true}",
            "optimizer.exp_avg_sq_dtype=bf16",
        ],
        "optimizer.exp_avg_sq_dtype",
    ),
    ("demo", ["optimizer.optimizer_offload_fraction=0.5"], "optimizer.optimizer_offload_fraction"),
    ("demo", ["train.early_stop={patience: 2}", "data.validation=0"], "train.early_stop"),
    ("demo", ["train.early_stop={patience: 2}", "train.eval_interval=0"], "train.early_stop"),
    ("demo", ["distributed.overlap_param_gather=true"], "distributed.overlap_param_gather"),
    ("demo", ["train.global_batch_size=12"], "train.global_batch_size"),
    ("demo", ["devices.per_node=3"], "parallel"),
    ("demo", ["devices.per_node=4"], "train.global_batch_size"),
    ("demo", ["model.recompute={granularity: selective, layers: 2}"], "model.recompute.layers"),
    ("demo", ["model.recompute={granularity: selective, modules: [attn]}"], "model.recompute.modules"),
    ("demo", ["model.recompute={granularity: full, modules: [mlp]}"], "model.recompute.modules"),
    ("demo", ["model.recompute={granularity: full, layers: 5}"], "model.recompute.layers"),
    ("qwen3-tp2-sp", ["model.recompute={granularity: selective, modules: [moe]}"], "model.recompute.modules"),
    (
        "qwen3-tp2-sp",
        ["model.recompute={granularity: selective, modules: [mla_up_proj]}"],
        "model.recompute.modules",
    ),
]


@pytest.mark.parametrize(
    ("name", "overrides", "key"), BROKEN, ids=[" ".join([name, *overrides]) for name, overrides, _ in BROKEN]
)
def test_each_broken_rule_is_named_once(name, overrides, key, messages):
    (violation,) = collect_violations(name, *overrides)
    assert violation.partition(": ")[0] == key
    messages(violation)


def test_a_date_that_no_calendar_has_is_named():
    keys = ["data.date=2025-02-31", "data.template=chat", "data.tokenizer=hf:x"]
    (violation,) = collect_violations("demo", *keys)
    assert violation.startswith("data.date: 2025-02-31: ")


def test_an_early_stop_looks_at_validation_sets_where_nothing_is_held_out():
    sets = "data.validation_sets={own: {path: [own.txt]}}"
    recipe = load("demo", ["train.early_stop={patience: 2}", "data.validation=0", sets])
    assert recipe.train.early_stop


def test_an_interleaved_pipeline_needs_micro_batches_in_multiples_of_its_stages(messages):
    recipe = load("qwen3-pp2-vpp2", ["train.global_batch_size=6"])
    (violation,) = recipe.find_layout_violations(2)
    assert "pp 2" in violation
    messages(violation)


SIZE = st.integers(1, 6)


@given(tp=SIZE, pp=SIZE, cp=SIZE, ep=SIZE, etp=SIZE, times=SIZE)
def test_a_world_fits_exactly_when_both_views_of_a_stage_divide(tp, pp, cp, ep, etp, times):
    parallel = Parallel(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)
    for world in (parallel.minimal_world * times, parallel.minimal_world * times + pp):
        divides = world % (pp * tp * cp) == 0 and world % (pp * etp * ep) == 0
        assert parallel.is_minimal_world_multiple(world) == divides
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
    ("section", "change", "key"),
    [
        ("model", {"fp8": {"scaling": "delayed"}}, "model.fp8"),
        ("model", {"mtp": {"layers": 1}}, "model.mtp.layers"),
        ("data", {"template": "plain"}, "data.template"),
        (
            "model",
            {"lora": {"rank": 2, "alpha": 4.0, "targets": ["q_proj"]}, "vision": {"tower_lr": 0.1}},
            "model.vision.tower_lr",
        ),
        (
            "model",
            {"lora": {"rank": 2, "alpha": 4.0, "targets": ["patch_embed.proj"]}},
            "model.lora.targets",
        ),
    ],
)
def test_what_is_not_computed_beside_a_vision_tower_is_named(section, change, key, messages):
    assert {"mrope", "multimodal"} <= from_mapping(SEEING).features
    with pytest.raises(UsageError) as refused:
        from_mapping(SEEING | {section: SEEING[section] | change})
    (violation,) = [line for line in refused.value.violations if line.startswith(f"{key}: ")]
    messages(violation)


@pytest.mark.parametrize("part", ["tower", "projector"])
def test_what_is_frozen_has_no_learning_rate(part, messages):
    vision = {f"freeze_{part}": True, f"{part}_lr": 0.1}
    with pytest.raises(UsageError) as refused:
        from_mapping(SEEING | {"model": SEEING["model"] | {"vision": vision}})
    (violation,) = [line for line in refused.value.violations if f"vision.{part}_lr: " in line]
    messages(violation)


@pytest.mark.parametrize(("layout", "vpp"), [("Ett|ttL", None), ("Et|t|t|tL", 2), ("E|t|t|t|t|L", 3)])
def test_a_layout_says_how_many_chunks_there_are(layout, vpp):
    for more in ({}, {"vpp": None}, {"vpp": vpp}):
        parallel = Parallel.model_validate({"pp": 2, "pipeline_model_parallel_layout": layout} | more)
        assert parallel.vpp == vpp


def test_the_rules_ask_what_the_first_chunk_of_a_layout_holds(messages):
    deep = next(case for case in CASES if len(case.vision.deepstack) == 2)  # and four decoder layers
    job = SEEING | {"model": {"config": deep.config}}
    for layout, pp, has in (("Ett|ttL", 2, 2), ("Et|t|t|tL", 2, 1), ("E|tttt|L", 3, 0)):
        parallel = {"pp": pp, "pipeline_model_parallel_layout": layout}
        if has == 2:
            assert from_mapping(job | {"parallel": parallel})
            continue
        with pytest.raises(UsageError, match=f"_layout: .* {has} of") as error:
            from_mapping(job | {"parallel": parallel})
        messages(error.value)


def test_a_layout_without_stages_is_blamed_alone(messages):
    (violation,) = collect_violations("demo", "parallel={pipeline_model_parallel_layout: Ett|ttmL}")
    assert violation.startswith(f"{LAYOUT}: ")
    messages(violation)


def test_layers_that_a_tower_gives_something_for_are_on_the_first_stage(messages):
    deep = next(case for case in CASES if len(case.vision.deepstack) == 2)  # and four decoder layers
    job = SEEING | {"model": {"config": deep.config}}
    assert from_mapping(job | {"parallel": {"pp": 2}})
    for parallel in ({"pp": 4}, {"pp": 2, "vpp": 2}):
        with pytest.raises(UsageError, match=r"first 2 .* has 1") as error:
            from_mapping(job | {"parallel": parallel})
        messages(error.value)
