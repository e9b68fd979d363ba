"""The plan as a whole: what it says, and every reason against it at once."""

import dataclasses
import json

import pytest

from bundle.capabilities.cuda import CUDA
from bundle.environment import compatibility
from bundle.environment.hardware import build_preset, detect
from bundle.errors import EnvironmentUnfit, ExitCode, UsageError
from bundle.patches import Decision, PatchAction, Presence
from bundle.patches.catalogue import PATCHES
from bundle.planning import to_json, to_text
from bundle.planning.plan import choose_hardware
from bundle.planning.problems import SHARED_EMBEDDING_PATCH
from bundle.recipe import load
from tests.environment.machines import recorded
from tests.environment.trees import install, stack_of
from tests.planning import jobs
from tests.planning.jobs import DEEPSEEK, QWEN3, job, read_section

QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.02,
    "output_router_logits": False,
}


def plan(recipe, hardware=None, version="0.16.1", decisions=(), **options):
    hardware = hardware or detect("cpu", recorded("cgroup-v1"))
    return jobs.plan(recipe, hardware, version, decisions, **options)


def problems(made):
    return [(problem.code, problem.text.partition(":")[0]) for problem in made.problems]


def decision(action, stops):
    return Decision(
        id=f"a-{action.lower()}", action=action, reason="because", range="", presence=Presence.PRESENT,
        proven=True, stops=stops,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["demo", "qwen3-tp2-sp", "qwen3-pp2-vpp2", "qwen3-cp2-packed"])
def test_the_built_in_recipes_run_on_a_cpu(name):
    made = plan(load(name))
    assert made.problems == ()
    assert made.exit_code is ExitCode.OK
    assert made.world == 2


def test_all_problems_come_at_once_gravest_first():
    recipe = job(
        QWEN3,
        model={"config": QWEN3, "recompute": {"granularity": "selective", "modules": ["layernorm"]}},
        backend="cpu",
        devices={"nodes": 1},
    )
    decisions = [
        decision(PatchAction.DRIFT, True),
        decision(PatchAction.TRAP, True),
        decision(PatchAction.SKIP, False),
    ]
    tiny = detect("cpu", recorded("cgroup-v1"))
    host = tiny.host._replace(memory=dataclasses.replace(tiny.host.memory, value=2.0**20))
    made = plan(recipe, tiny._replace(host=host), decisions=decisions)
    assert problems(made) == [
        (ExitCode.USAGE, "model.recompute.modules"),
        (ExitCode.USAGE, "a-trap"),
        (ExitCode.ENVIRONMENT_UNFIT, "memory"),
        (ExitCode.PATCHES, "a-drift"),
    ]
    assert made.exit_code is ExitCode.USAGE


def test_a_layout_that_does_not_fit_leaves_the_rest_of_the_plan():
    made = plan(job(QWEN3, parallel={"tp": 2}), per_node=3)
    assert problems(made) == [(ExitCode.USAGE, "parallel")]
    assert made.layout is None
    assert "problems" in to_text(made, "run", "starts")


def test_a_batch_that_does_not_divide_hides_neither_stages_nor_memory(messages):
    layout = {"parallel": {"tp": 2, "pp": 2}}
    whole, odd = (job(QWEN3, train={"global_batch_size": size}, **layout) for size in (12, 11))
    fits, made = (plan(recipe, build_preset("h200"), per_node=8) for recipe in (whole, odd))
    (problem,) = made.problems
    assert fits.problems == () and problem.code is ExitCode.USAGE
    assert "global_batch_size" in problem.text
    messages(problem.text)
    assert made.memory == fits.memory and made.layout == fits.layout
    counted = "micro-batches per step"
    assert counted in to_text(fits, "run", "starts") and counted not in to_text(made, "", "")


def of_ascend(made):
    (note,) = [note for note in made.notes if note.startswith("ascend: ")]
    return note


def test_a_plan_for_ascend_says_that_it_was_trained_on_emulated_npus_only_and_with_which_torch_npu():
    made = plan(job(QWEN3), build_preset("a3"), per_node=4)
    assert not made.problems and of_ascend(made) in to_text(made, "run", "starts")
    pinned = {image.packages.get("torch-npu") for image in compatibility.load().images} - {None}
    assert "emulated NPUs" in of_ascend(made) and "torch-npu 2.13.0" in of_ascend(made)
    assert all(version in of_ascend(made) for version in pinned) and pinned
    assert not any("emulated" in note for note in plan(job(QWEN3), build_preset("h200")).notes)


@pytest.mark.parametrize(("version", "is_covered"), [("2.13.0", True), ("2.12.0", False)])
def test_what_was_emulated_covers_no_other_torch_npu(tmp_path, version, is_covered, messages):
    install(tmp_path, "torch-npu", version)
    note = of_ascend(plan(job(QWEN3), build_preset("a3"), per_node=4, installed=stack_of(tmp_path)))
    assert version in note and note.count("torch-npu") == (1 if is_covered else 2)
    messages(note)


def test_what_an_acceptance_has_seen_takes_the_place_of_what_was_emulated(tmp_path, monkeypatch, messages):
    table = compatibility.load()
    (emulated,) = [seen for seen in table.combinations if seen.backend == "ascend"]
    packages = emulated.packages | {"torch-npu": "2.10.0"}
    seen = emulated.model_copy(update={"device": "910B3", "packages": packages, "date": "2026-07-01"})
    with_it = table.model_copy(update={"combinations": (*table.combinations, seen)})
    monkeypatch.setattr(compatibility, "load", lambda: with_it)
    install(tmp_path, "torch-npu", "2.13.0")
    note = of_ascend(plan(job(QWEN3), build_preset("a3"), per_node=4, installed=stack_of(tmp_path)))
    assert "910B3" in note and "emulated" not in note
    assert note.index("2.10.0") < note.index("2026-07-01") < note.index("2.13.0")
    messages(note)


@pytest.mark.parametrize(
    ("machine", "version", "said"), [("a3", "0.18.2", 1), ("a3", "0.17.1", 0), ("h200", "0.18.2", 0)]
)
def test_a_plan_for_ascend_says_whose_triton_megatron_imports(machine, version, said):
    notes = plan(job(QWEN3), build_preset(machine), version, per_node=4).notes
    assert sum("imports triton" in note and "triton-ascend" in note for note in notes) == said


def test_operators_are_those_that_the_backend_has_and_the_recipe_leaves_in(messages):
    def on(machine, *names):
        return plan(
            job(QWEN3, model={"config": QWEN3, "operators": names}), build_preset(machine), per_node=4
        )

    text = read_section(on("a3", "swiglu"), "operators")
    assert "npu_swiglu" in text and "rms_norm" in text and "npu_rms_norm" not in text
    assert "npu_grouped_matmul" not in text  # there are no experts
    messages(text)
    for machine, operators in (("a3", ("swiglu", "gelu")), ("h200", ("swiglu",))):
        (problem,) = on(machine, *operators).problems
        assert problem.text.startswith("model.operators") and operators[-1] in problem.text
        messages(problem.text)


@pytest.mark.parametrize(("cp", "most"), [(1, "2,048"), (2, "1,024")])
def test_a_plan_for_ascend_says_how_many_sequences_a_pack_may_hold(cp, most, messages):
    packed = {"data": {"packed": True}, "parallel": {"cp": cp}}
    text = read_section(plan(job(QWEN3, **packed), build_preset("a3"), per_node=4), "attention")
    assert f"{most} sequences" in text
    messages(text)
    rows = read_section(plan(job(QWEN3), build_preset("a3"), per_node=4), "attention")
    assert "sequences" not in rows


def test_too_few_devices_are_the_machines_problem():
    made = plan(job(QWEN3), build_preset("h200"), per_node=12)
    assert problems(made) == [(ExitCode.ENVIRONMENT_UNFIT, "devices.per_node")]
    assert "devices.per_node: 12" in made.problems[0].text


def advice(problem):
    return problem.text.partition("(")[2]


def test_what_does_not_fit_a_device_says_what_is_large(messages):
    wide = DEEPSEEK | {"hidden_size": 65536, "intermediate_size": 262144}
    made = plan(job(wide, train={"steps": 1, "global_batch_size": 8}), build_preset("h200"))
    (problem,) = made.problems
    assert problem.code is ExitCode.ENVIRONMENT_UNFIT
    assert "weights" in advice(problem) and "activations" not in advice(problem)
    assert all(axis in advice(problem) for axis in ("tp", "pp", "ep", "data-parallel"))
    messages(problem.text)
    long = job(
        QWEN3 | {"max_position_embeddings": 2**22},
        data={"sequence_length": 2**22},
        train={"steps": 1, "global_batch_size": 64, "micro_batch_size": 8},
    )
    problem = plan(long, build_preset("h200")).problems[0]
    assert "activations" in advice(problem) and "weights" not in advice(problem)
    assert all(key in advice(problem) for key in ("micro_batch_size", "sequence_length", "recompute", "cp"))
    messages(problem.text)


def test_what_is_done_already_is_no_advice(messages):
    long = load("sft-qwen3-vl-8b-a3", ["data.sequence_length=16384"])
    (problem,) = plan(long, build_preset("a3")).problems
    assert "sequence_length" in advice(problem) and "freeze_tower" in advice(problem)
    assert not any(key in advice(problem) for key in ("micro_batch_size", "recompute"))
    messages(problem.text)
    frozen = load("sft-qwen3-vl-8b-a3", ["data.sequence_length=16384", "model.vision.freeze_tower=true"])
    assert plan(frozen, build_preset("a3")).problems == ()


LONG = "data.sequence_length=1048576"
STAGES = ("parallel.pp=2", "parallel.num_layers_in_first_pipeline_stage=3")
KEYS = ("micro_batch_size", "sequence_length", "freeze_tower", "freeze_projector", "recompute")
LENGTH, FREEZING = {"sequence_length"}, {"freeze_tower", "freeze_projector"}


@pytest.mark.parametrize(
    ("changes", "of_stages"),
    [
        ((), [LENGTH | FREEZING]),
        (("model.vision.freeze_tower=true",), [LENGTH]),
        (("model.lora={rank: 8, alpha: 8, targets: [q_proj]}",), [LENGTH]),
        (STAGES, [LENGTH | FREEZING, LENGTH]),  # the last has no tower
        (
            ("model.recompute.granularity=selective", "model.recompute.modules=[core_attn]"),
            [LENGTH | FREEZING | {"recompute"}],
        ),
    ],
)
def test_advice_is_what_would_help_and_is_not_done_yet(changes, of_stages, messages):
    problems = plan(load("sft-qwen3-vl-8b-a3", [LONG, *changes]), build_preset("a3")).problems
    assert [{key for key in KEYS if key in advice(problem)} for problem in problems] == of_stages
    for problem in problems:
        messages(problem.text)


def test_more_replicas_are_no_advice_where_each_has_the_whole_state(messages):
    changes = ("optimizer.use_distributed_optimizer=false", "parallel.tp=1")
    (problem,) = plan(load("sft-qwen3-vl-8b-a3", changes), build_preset("a3")).problems
    assert "weights" in advice(problem) and "data-parallel" not in advice(problem)
    messages(problem.text)


def test_a_layout_that_does_not_fit_says_what_it_divides_and_what_would(messages):
    made = plan(
        job(DEEPSEEK, parallel={"pp": 2, "ep": 8, "tp": 2, "etp": 1}), build_preset("h200"), per_node=8
    )
    dense = plan(job(QWEN3, parallel={"tp": 2, "pp": 2}), build_preset("h200"), per_node=6)
    experts, whole = (
        next(problem.text for problem in refused.problems if problem.text.startswith("parallel:"))
        for refused in (made, dense)
    )
    assert "16 ranks" in experts and "parallel.ep=4" in experts
    assert "4 ranks" in whole and "parallel.ep" not in whole
    messages(experts)
    messages(whole)


def test_a_tight_fit_is_a_note():
    recipe = job(
        QWEN3 | {"max_position_embeddings": 2**20},
        data={"sequence_length": 2**20},
        train={"steps": 1, "global_batch_size": 8},
    )
    roomy = plan(recipe, build_preset("h200"))
    (stage,) = roomy.memory
    devices = tuple(
        dataclasses.replace(d, memory=dataclasses.replace(d.memory, value=stage.peak_bytes + 1))
        for d in build_preset("h200").devices
    )
    tight = plan(recipe, build_preset("h200")._replace(devices=devices))
    assert roomy.problems == tight.problems == ()
    assert roomy.notes == ()
    assert "memory is tight" in tight.notes[0]


@pytest.mark.parametrize(
    ("machine_name", "fp8", "fails"),
    [
        ("h200", {"scaling": "blockwise"}, False),
        ("h200", {"scaling": "mxfp8"}, True),
        ("b200", {"scaling": "mxfp8"}, False),
        ("a100", {"scaling": "delayed"}, True),
        ("a3", {"scaling": "delayed"}, True),
    ],
)
def test_fp8_asks_for_the_device(machine_name, fp8, fails):
    recipe = job(QWEN3, model={"config": QWEN3, "fp8": fp8}, train={"steps": 1, "global_batch_size": 16})
    made = plan(recipe, build_preset(machine_name))
    assert problems(made) == ([(ExitCode.ENVIRONMENT_UNFIT, "model.fp8")] if fails else [])


def test_a_kernel_that_the_backend_does_not_have(messages):
    recipe = job(
        QWEN3, model={"config": QWEN3, "attention": "fused"}, train={"steps": 1, "global_batch_size": 16}
    )
    (problem,) = plan(recipe, build_preset("a3")).problems
    assert problem.text.startswith("model.attention") and "ascend" in problem.text
    messages(problem.text)


def test_what_a_kernel_computes_in_is_its_backend_s_to_say(messages):
    recipe = load("qwen3-tp2-sp", ["model.attention=flash", "model.dtype=fp32"])
    assert plan(recipe).problems == ()
    (refused,) = (why.text for why in plan(recipe, build_preset("h200")).problems if "attention" in why.text)
    assert "flash" in refused and "model.dtype" in refused
    messages(refused)


@pytest.mark.parametrize(("attention", "fails"), [("auto", False), ("flash", True), ("unfused", False)])
def test_fp32_leaves_auto_a_kernel_that_takes_it(attention, fails):
    recipe = job(
        QWEN3,
        model={"config": QWEN3, "dtype": "fp32", "attention": attention},
        train={"steps": 1, "global_batch_size": 16},
    )
    made = plan(recipe, build_preset("h200"))
    assert problems(made) == ([(ExitCode.USAGE, "model.attention")] if fails else [])


@pytest.mark.parametrize(
    ("model", "fails"),
    [
        ({"dtype": "bf16"}, []),
        ({"dtype": "bf16", "attention": "unfused"}, ["unfused"]),
        # Each kernel has a reason: two take no fp32, and the third cannot share a sequence.
        ({"dtype": "fp32"}, ["flash", "fused", "unfused"]),
    ],
)
def test_ranks_can_share_a_sequence_only_where_the_kernel_can(model, fails, messages):
    train = {"steps": 1, "global_batch_size": 16}
    recipe = job(QWEN3, model={"config": QWEN3, **model}, parallel={"cp": 2}, train=train)
    reasons = [
        problem.text.removeprefix("model.attention: ")
        for problem in plan(recipe, build_preset("h200")).problems
    ]
    assert [reason.partition(" ")[0] for reason in reasons] == fails
    for reason in reasons:
        messages(reason)
    assert plan(recipe).problems == ()  # the cpu's kernels all can


def test_heads_that_no_kernel_takes(messages):
    wide = QWEN3 | {"head_dim": 1024}
    made = plan(
        job(wide, data={"packed": True, "sequence_length": 64}, train={"steps": 1, "global_batch_size": 16}),
        build_preset("a3"),
    )
    assert [code for code, _ in problems(made)] == [ExitCode.USAGE, ExitCode.USAGE]
    assert "768" in made.problems[0].text
    messages(made.problems[0].text)


@pytest.mark.parametrize(
    ("action", "fails"), [(PatchAction.APPLY, False), (PatchAction.SKIP, False), (PatchAction.OWNED, True)]
)
def test_a_shared_embedding_across_buckets_is_refused_where_nobody_mends_it(action, fails):
    recipe = job(DEEPSEEK, parallel={"pp": 2}, train={"steps": 1, "global_batch_size": 16})
    patch = decision(action, False)._replace(id=SHARED_EMBEDDING_PATCH)
    made = plan(recipe, decisions=[patch])
    assert problems(made) == ([(ExitCode.USAGE, "parallel.pp")] if fails else [])


def test_the_patch_of_the_shared_embedding_is_in_the_list():
    assert SHARED_EMBEDDING_PATCH in {patch.id for patch in PATCHES}


def test_an_inference_card_is_unfit(messages):
    made = plan(job(QWEN3), detect(machine=recorded("310p")))
    (problem,) = (problem for problem in made.problems if "310P3" in problem.text)
    assert problem.code is ExitCode.ENVIRONMENT_UNFIT
    messages(problem.text)


def test_a_plan_is_json_and_text(messages):
    made = plan(
        load("demo"), decisions=[decision(PatchAction.APPLY, False), decision(PatchAction.SKIP, False)]
    )
    said = json.loads(json.dumps(to_json(made), allow_nan=False))
    assert said["exit_code"] == 0
    assert said["layout"]["axes"]["ep"] == {"size": 2, "stride": 1, "first_group": [0, 1]}
    assert said["stages"][0]["bytes"]["total"] == made.memory[0].peak_bytes
    (chunk,) = said["stages"][0]["chunks"]
    assert (chunk["layers"], chunk["mtp_layers"], chunk["head"]) == ([0, 1, 2, 3], 1, True)
    assert said["recipe"] == load("demo").dump()
    assert said["step"]["tokens"] == 16 * 128 and said["step"]["peak"] is None
    shown = to_text(made, "run it", "start it")
    assert "APPLY a-apply: because" in shown
    assert "1 not needed" in shown
    messages(read_section(made, "stages"))


def test_the_size_of_the_model_and_the_work_of_a_step_are_shown(messages):
    wide = QWEN3_MOE | {"hidden_size": 1024, "num_hidden_layers": 4, "vocab_size": 1000}
    recipe = job(wide, data={"sequence_length": 64}, train={"steps": 1, "global_batch_size": 80})
    made = plan(recipe, build_preset("h200"))
    layer = 128 * 1024 + 1024 * 64 + 2 * 1024 + 2 * 16 + 8 * 1024  # attention, norms, router
    expert = 3 * 32 * 1024
    parameters = 2 * 1000 * 1024 + 1024 + 4 * (layer + 8 * expert)
    matrices = 1000 * 1024 + 4 * (layer - 2 * 1024 - 2 * 16 + 2 * expert)
    flops = 6 * 80 * (64 * matrices + 64 * 65 // 2 * 4 * 4 * 2 * 16)
    said = to_json(made)
    assert said["model"] == {
        "parameters": parameters, "active_parameters": parameters - 4 * 6 * expert, "mtp_parameters": 0
    }  # fmt: skip
    assert said["step"] == {
        "tokens": 5120,
        "flops": flops,
        "peak": {
            "device": "NVIDIA H200",
            "bf16": 989e12,
            "memory_bandwidth": 4.8e12,
            "source": CUDA.peaks[0].source,
        },
    }
    seconds, stored = flops / (8 * 989e12), parameters + 2 * 24 * 1024
    for section, values in (
        ("model", (f"{parameters / 1e6:.1f} M", f"{(parameters - 24 * expert) / 1e6:.1f} M")),
        ("step", ("5,120 tokens", f"{flops / 1e9:.1f} GFLOPs", f"{seconds:.2g} s", "989.0 T")),
        ("checkpoint", (f"{stored * 14 / 2**20:.1f} MiB", f"{stored * 14 * 3 / 2**20:.1f} MiB")),
    ):
        shown = read_section(made, section)
        assert [value for value in values if value not in shown] == []
        messages(shown)


def test_the_work_of_a_step_is_said_to_lack_a_tower_that_images_decide(messages):
    for name, has in (("sft-qwen3-vl-8b-h200", True), ("sft-qwen3-8b-h200", False)):
        shown = read_section(plan(load(name), build_preset("h200")), "step")
        assert ("vision" in shown) == has
        messages(shown)


def test_what_has_no_known_rate_takes_no_time():
    recipe = job(QWEN3, model={"config": QWEN3, "dtype": "fp32"}, train={"global_batch_size": 16})
    for made in (plan(recipe, build_preset("h200")), plan(job(QWEN3))):
        assert "FLOPs" in (said := to_text(made, "run", "starts")) and "peak of" not in said


def test_the_balancing_of_experts_is_shown(messages):
    unasked = DEEPSEEK | {"aux_loss_alpha": 0.25, "seq_aux": True}
    chosen = {"z_loss_coeff": 0.125, "bias_update_rate": 0.5}
    made = plan(job(unasked, model={"config": unasked, "moe": chosen}))
    shown = read_section(made, "experts")
    assert all(value in shown for value in ("0.25", "sequence", "z-loss", "0.125", "0.5"))
    messages(shown)
    said = to_json(made)["balancing"]
    assert said == {"aux_loss_coeff": 0.25, "over": "sequence", **chosen}


def test_a_coefficient_that_the_config_does_not_ask_for_is_shown_and_can_be_taken(messages):
    made = plan(job(QWEN3_MOE))
    taken = plan(job(QWEN3_MOE, model={"config": QWEN3_MOE, "moe": {"aux_loss_coeff": 0.02}}))
    ignored, counted = (read_section(of, "experts") for of in (made, taken))
    assert "output_router_logits" in ignored and "output_router_logits" not in counted
    assert to_json(taken)["balancing"]["aux_loss_coeff"] == 0.02
    messages(ignored)
    messages(counted)
    assert to_json(plan(job(QWEN3)))["balancing"] is None


def test_a_named_machine_wins_over_the_recipe_and_says_so(messages):
    hardware, notes = choose_hardware("cpu", None, "h200")
    assert hardware.backend == "cuda"
    assert ["backend cpu" in note for note in notes] == [False, True]
    messages("\n".join(notes))
    assert (
        len(choose_hardware("auto", None, "a3")[1]) == 1
        and "planned for a3" in choose_hardware("auto", None, "a3")[1][0]
    )


def test_flags_that_contradict_each_other(messages):
    with pytest.raises(UsageError, match="--hardware h200") as error:
        choose_hardware("auto", "ascend", "h200")
    messages(error.value)


def test_a_backend_that_this_machine_lacks_names_the_way_out():
    with pytest.raises(EnvironmentUnfit, match="--hardware a100"):
        choose_hardware("ascend", None, None)
