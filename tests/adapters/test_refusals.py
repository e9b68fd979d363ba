"""What is not computed is refused by its name, all at once, before a rank starts."""

import json
import math
from itertools import product

import pytest

from bundle.architectures import adapters
from bundle.checkpoints import state
from bundle.environment.hardware import build_preset, detect
from bundle.errors import UsageError
from bundle.planning.inputs import inspect_weights
from bundle.recipe import from_mapping
from tests.environment.machines import recorded
from tests.planning.jobs import DEEPSEEK, QWEN3, job, plan
from tests.pretrained.directories import header, write_file

LORA = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "down_proj"]}
WRITTEN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["down_proj", "q_proj"]}
UNUSED = {"bias": "none", "use_dora": False, "rank_pattern": {}, "layers_pattern": None, "lora_dropout": 0.1}


def with_lora(config=QWEN3, *, model=None, **sections):
    return job(config, model={"config": config, "lora": LORA, **(model or {})}, **sections)


def violations(*args, **sections):
    with pytest.raises(UsageError) as error:
        with_lora(*args, **sections)
    return "\n".join(error.value.violations)


def test_a_target_that_no_projection_has_is_named_with_those_that_there_are(messages):
    said = violations(model={"lora": LORA | {"targets": ["q_proj", "lm_head", "w1", "q_norm"]}})
    assert said.startswith("model.lora.targets: ")
    assert all(name in said for name in ("lm_head", "w1", "q_norm", "down_proj", "v_proj"))
    messages(said)


def test_all_linear_layers_are_every_projection_by_its_name(messages):
    every = LORA | {"targets": "all-linear"}
    dense = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(with_lora(model={"lora": every}).model.lora.targets) == dense
    latent = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"} | dense - {
        "q_proj",
        "k_proj",
        "v_proj",
    }
    assert set(with_lora(DEEPSEEK, model={"lora": every}).model.lora.targets) == latent
    said = violations(model={"lora": LORA | {"targets": ["all-linear", "q_proj"]}})
    assert "all-linear" in said
    messages(said)


def test_what_is_not_computed_beside_adapters(messages):
    said = violations(
        DEEPSEEK,
        model={
            "lora": LORA | {"targets": ["o_proj"]},
            "fp8": {"scaling": "delayed"},
            "moe": {"bias_update_rate": 0.1},
            "mtp": {"layers": 2},
        },
    )
    for key in ("model.fp8.scaling", "model.moe.bias_update_rate", "model.mtp.layers"):
        assert f"{key}: " in said
    messages(said)
    with pytest.raises(UsageError, match=r"model\.lora") as error:
        job(QWEN3, checkpoint={"export": "peft"})
    messages(error.value)
    assert len(error.value.violations) == 1


def test_steering_biases_stay_where_nobody_says_otherwise():
    assert with_lora(DEEPSEEK, model={"lora": LORA | {"targets": ["o_proj"]}}).model.moe.bias_update_rate == 0
    assert job(DEEPSEEK).model.moe.bias_update_rate > 0


def test_a_stage_without_adapters_is_refused_in_the_plan(messages):
    experts_only = LORA | {"targets": ["experts.0.up_proj"]}  # the first layer has no experts
    recipe = with_lora(DEEPSEEK, model={"lora": experts_only}, parallel={"pp": 4})
    on = detect("cpu", recorded("cgroup-v1"))
    made = plan(recipe, on, nodes=1, per_node=4)
    (text,) = [problem.text for problem in made.problems]
    assert text.startswith("model.lora.targets: ") and "stage 0" in text
    messages(text)
    bare = {"pp": 2, "pipeline_model_parallel_layout": "E|ttttL"}
    (text,) = [problem.text for problem in plan(with_lora(parallel=bare), on, nodes=1, per_node=2).problems]
    assert text.startswith("model.lora: ") and "stage 0" in text
    messages(text)
    assert not plan(with_lora(), build_preset("h200"), nodes=1, per_node=1).problems


def directory(path, said=WRITTEN, shapes=None):
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(UNUSED | said))
    layer = "base_model.model.model.layers.{}.{}.lora_{}.weight"
    heads = 4 * 16  # queries of QWEN3
    sizes = {"self_attn.q_proj": (heads, 64), "mlp.down_proj": (64, 96)}
    whole = {
        layer.format(number, module, which): (4, columns) if which == "A" else (rows, 4)
        for number in range(4)
        for module, (rows, columns) in sizes.items()
        for which in "AB"
    }
    write_file(path / "adapter_model.safetensors", header(whole | (shapes or {}), "F32"))
    return path


def beginning(path, **lora):
    return with_lora(model={"lora": {"path": str(path), **lora}})


def test_an_adapter_says_its_rank_alpha_and_targets(tmp_path):
    read = beginning(directory(tmp_path / "adapter"))
    assert (read.model.lora.rank, read.model.lora.alpha) == (4, 8.0)
    assert read.model.lora.targets == ("down_proj", "q_proj")
    assert not inspect_weights(read).problems
    assert from_mapping(read.dump()) == read
    with pytest.raises(UsageError) as error:
        beginning(tmp_path / "adapter", rank=8, targets=["q_proj", "down_proj"])
    (said,) = error.value.violations
    assert "model.lora.rank: 8 " in said
    assert " 4 " in said


@pytest.mark.parametrize("flag", ["use_rslora", "use_dora"])
def test_an_adapter_says_by_flags_what_it_computes(tmp_path, flag):
    given = {flag: True}
    read = beginning(directory(tmp_path / "adapter", WRITTEN | given), dropout=0, loraplus_lr_ratio=16)
    lora = read.model.lora
    assert (lora.use_rslora, lora.use_dora) == (flag == "use_rslora", flag == "use_dora")
    assert lora.scale == (8 / 4**0.5 if lora.use_rslora else 8 / 4)
    written = adapters.build_adapter_config(lora.model_dump(), None)
    assert (written["use_rslora"], written["use_dora"]) == (lora.use_rslora, lora.use_dora)
    plain = beginning(directory(tmp_path / "plain"))
    saved = [state.describe_adapters(recipe, loaded=True) or {} for recipe in (read, plain)]
    assert saved[0] == saved[1] | given and len(saved[0]) > len(saved[1])
    with pytest.raises(UsageError) as error:
        beginning(tmp_path / "plain", **given)
    (said,) = error.value.violations
    assert f"model.lora.{flag}: True " in said
    missing = "\n".join(problem.text for problem in inspect_weights(read).problems)
    assert ("self_attn.q_proj.lora_magnitude_vector" in missing) == lora.use_dora


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "IA3"),
        ("use_dora", "true"),
        ("use_rslora", 1),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 8}),
        ("alpha_pattern", {"q_proj": 8}),
        ("layers_to_transform", [1]),
        ("target_parameters", ["mlp.experts.down_proj"]),
        ("bias", "all"),
        ("init_lora_weights", "pissa"),
        ("target_modules", ".*_proj"),
        ("some_later_key", True),
        *product(["r"], [0, -4, "4", 4.0, True, [], {}]),
        *product(["lora_alpha"], [0, -1, "x", [], {}, True, math.nan, math.inf, 10**400]),
        *product(["target_modules"], [5, True, {}, [], ["q_proj", 1], ["q_proj", ""], [["q_proj"]]]),
    ],
)
def test_what_peft_computes_and_this_does_not_is_named(tmp_path, key, value):
    with pytest.raises(UsageError) as error:
        beginning(directory(tmp_path / "adapter", WRITTEN | {key: value}))
    (said,) = error.value.violations
    assert said.startswith("model.lora.path: ")
    assert key in said


def test_all_that_an_adapters_file_has_wrong_is_said_at_once(tmp_path):
    wrong = {"r": "4", "lora_alpha": [], "target_modules": 5, "bias": "all", "later\x1b": {"a": [1]}}
    with pytest.raises(UsageError) as error:
        beginning(directory(tmp_path / "adapter", WRITTEN | wrong))
    said = "\n".join(error.value.violations)
    assert len(error.value.violations) == len(wrong) and "\x1b" not in said
    for key in wrong:
        assert key.rstrip("\x1b") in said


def test_matrices_of_another_model_are_listed_together(tmp_path, messages):
    at = "base_model.model.model.layers"
    wrong = {
        f"{at}.0.self_attn.q_proj.lora_A.weight": (64, 4),  # transposed
        f"{at}.4.self_attn.q_proj.lora_A.weight": (4, 64),  # of a layer that there is not
        f"{at}.0.self_attn.k_proj.lora_A.weight": (4, 64),  # of no target
    }
    recipe = beginning(directory(tmp_path / "adapter", shapes=wrong))
    said = "\n".join(problem.text for problem in inspect_weights(recipe).problems)
    assert all(name in said for name in wrong) and "[64, 4]" in said and "[4, 64]" in said
    messages(said)
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    (problem, *_) = inspect_weights(recipe).problems
    assert "adapter_model.safetensors" in problem.text
    messages(problem.text)
