"""Recipes as users give them: names, files, overrides, mistakes."""

import json
import re

import pytest
from pydantic import ValidationError

from bundle.errors import UsageError
from bundle.recipe import (
    Recipe,
    find_recipe,
    flatten,
    from_mapping,
    list_built_in,
    list_differences,
    load,
    with_epochs_as_steps,
)
from tests.recipe.violations import without_place


def violations(*overrides: str, name: str = "demo") -> tuple[str, ...]:
    with pytest.raises(UsageError) as caught:
        load(name, overrides)
    assert caught.value.code == 2
    return caught.value.violations


# Those for published models take clusters: tests/planning/test_ready.py.
@pytest.mark.parametrize("name", [name for name in list_built_in() if not name.endswith(("-h200", "-a3"))])
def test_every_built_in_recipe_loads_under_its_name_and_fits_two_ranks(name):
    recipe = load(name)
    assert recipe.name == name
    assert recipe.parallel.minimal_world in (1, 2)
    assert recipe.find_layout_violations(2) == []


@pytest.mark.parametrize("name", list_built_in())
def test_a_dump_is_complete_and_loads_to_an_equal_recipe(name):
    recipe = load(name)
    dump = recipe.dump()
    again = from_mapping(json.loads(json.dumps(dump)))
    assert again == recipe and not list_differences(recipe, again)
    top = {key for key in Recipe.list_key_paths() if "." not in key}
    assert set(dump) == top and dump["checkpoint"]["async"] is False


def test_overrides_reach_any_depth_and_make_sections():
    recipe = load(
        "demo",
        [
            "train.steps=40",
            "optimizer.lr=1e-4",
            "optimizer.min_lr=0.0",
            "model.recompute.granularity=full",
            "model.config.num_hidden_layers=2",
            "data.path=[a.py, b.py]",
            "model.mtp.layers=0",
        ],
    )
    assert recipe.train.steps == 40 and recipe.optimizer.lr == 1e-4
    assert recipe.model.recompute and recipe.model.recompute.method == "uniform"
    assert recipe.architecture.num_layers == 2 and recipe.architecture.mtp_layers == 0
    assert recipe.data.path == ("a.py", "b.py")
    single = load("demo", ["data.path=one.py"])
    assert single.data.path == ("one.py",)


def test_a_key_is_called_by_the_name_that_a_file_has_for_it(messages):
    (said,) = violations("checkpoint.asinc=true")
    assert "checkpoint.async" in said
    messages(said)
    written = {key for key, _ in flatten(load("demo").dump()) if not key.startswith("model.config.")}
    assert written <= set(Recipe.list_key_paths()) and "checkpoint.async" in written


def test_all_violations_at_once_each_with_its_place(messages):
    found = violations(
        "train.stesp=3", "modle.dtype=bf16", "lr=3", "parallel.ep=3", "data.sequence_length=1000", "task=sft"
    )
    reasons = list(map(without_place, found))
    assert [reason.partition(": ")[0] for reason in reasons] == [
        *("train.stesp", "modle", "lr", "parallel.ep", "data.sequence_length", "data.source")
    ]
    messages("\n".join(reasons))
    assert found[0].startswith("--set train.stesp=3: ") and ".yaml:" in found[5]


def test_a_key_that_is_like_none_is_answered_with_those_of_its_section():
    one, whole = violations("tensor_model_parallel_size=2", "optimizer.muon_nesterov=true")
    assert "name, task, backend, " in whole and ", parallel, " in whole
    assert "optimizer.muon_nesterov: " in one
    assert set(one.partition(" has ")[2].split(", ")) == set(load("demo").dump()["optimizer"])


def test_an_unsupported_model_is_named_where_it_is_said():
    (found,) = violations("model.config.model_type=qwen33")
    assert "--set model.config.model_type=qwen33" in found
    assert "'qwen33'" in found and " qwen3" in found and "deepseek_v2" in found


def test_types_are_strict_and_shown():
    found = violations(
        "train.steps=true", "train.global_batch_size='16'", "optimizer.lr=-1", "model.dtype=fp16", "seed=1.5"
    )
    assert len(found) == 5
    assert "train.steps" in found[0] or any("train.steps" in line for line in found)
    assert any("'16'" in line for line in found)
    assert any("'bf16' or 'fp32'" in line for line in found)


def test_architecture_violations_carry_the_line_of_their_key():
    found = violations("model.config.hidden_act=relu", "model.config.q_lora_rank=-1", "train.steps=0")
    assert any(line.startswith("--set train.steps=0: train.steps: ") for line in found)
    assert any(
        line.startswith("--set model.config.q_lora_rank=-1: model.config.q_lora_rank: ") for line in found
    )
    assert any("hidden_act: 'relu'" in line for line in found)


def test_a_key_of_the_config_is_named_once_with_its_value_and_where_that_was_written():
    rope = {"rope_theta": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    section = "model.config"
    override = f"{section}={json.dumps({'model_type': 'qwen3', 'hidden_size': -7} | rope)}"
    found = [line.removeprefix(f"--set {override[:100]}: ") for line in violations(override)]
    (of_size,) = [line for line in found if "hidden_size" in line]
    assert of_size.startswith(f"{section}.hidden_size: ") and of_size.endswith("-7")
    assert of_size.count("hidden_size") == 1
    of_theta = [line for line in found if line.startswith(f"{section}.rope_theta: 0: ")]
    assert any("1000000.0" in line for line in of_theta)
    assert not any("1000000000000" in line for line in found)


@pytest.mark.parametrize("override", ["train", "=3", "train..steps=3", "name.x=3", "data.path.x=3"])
def test_a_malformed_override_is_named(override):
    assert any(f"--set {override}" in line for line in violations(override))


@pytest.mark.parametrize("said", ["environment.WANDB_API_KEY=s3cret", "environment={WANDB_API_KEY: s3cret}"])
def test_a_variable_s_value_is_shown_nowhere(said, messages):
    with pytest.raises(UsageError, match=r"--set environment.*=\.\.\.: ") as refused:
        load("demo", [said])
    messages(refused.value)
    assert "s3cret" not in str(refused.value)


def test_a_file_is_read_from_its_path(tmp_path):
    text = find_recipe("demo").read_text()
    (tmp_path / "mine.yaml").write_text(text.replace("name: demo", "name: mine"))
    assert load(tmp_path / "mine.yaml").name == "mine"
    (tmp_path / "mine.yaml").write_text(text.replace("steps: 300", "steps: 300\n  steps: 3"))
    with pytest.raises(UsageError, match=r"mine\.yaml:\d+: ") as error:
        load(str(tmp_path / "mine.yaml"))
    assert "train.steps" in str(error.value)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"name: x", b"[1"])
def test_files_that_are_no_recipes_are_usage_errors(tmp_path, content):
    (tmp_path / "r.yaml").write_bytes(content)
    with pytest.raises(UsageError, match=r"r\.yaml"):
        load(tmp_path / "r.yaml")


@pytest.mark.parametrize(("name", "named"), [("./nowhere.yaml", "nowhere.yaml"), ("dmeo", "demo")])
def test_missing_files_and_names(name, named, messages):
    with pytest.raises(UsageError, match=named) as error:
        load(name)
    messages(str(error.value).partition("\n")[0])


def test_a_config_directory_is_read_overridden_and_dumped(tmp_path):
    config = load("demo").model.config
    (tmp_path / "config.json").write_text(json.dumps(config))
    values = load("demo").dump()
    values["model"] |= {"path": str(tmp_path), "config": {"num_hidden_layers": 3}}
    recipe = from_mapping(values)
    assert recipe.architecture.num_layers == 3
    assert recipe.dump()["model"]["config"] == config | {"num_hidden_layers": 3}
    values["model"] |= {"path": str(tmp_path / "gone"), "config": {}}
    with pytest.raises(UsageError, match=r"model\.path"):
        from_mapping(values)


def test_nulls_follow_tp_and_stay_overridable():
    follows = load("qwen3-tp2-sp", ["parallel.sequence_parallel=null"]).parallel
    assert (follows.sequence_parallel, follows.etp) == (True, 2)
    overridden = load("qwen3-tp2-sp", ["parallel.sequence_parallel=false"]).parallel
    assert overridden.sequence_parallel is False


def test_fine_scales_take_e4m3_for_gradients_too():
    formats = {
        scaling: load("demo", [f"model.fp8.scaling={scaling}", "model.dtype=bf16"]).model.fp8
        for scaling in ("delayed", "tensorwise", "blockwise", "mxfp8")
    }
    assert [fp8 and fp8.format for fp8 in formats.values()] == ["hybrid", "hybrid", "e4m3", "e4m3"]


def test_differences_name_keys_and_know_what_a_resume_may_change():
    old = load("demo")
    new = load("demo", ["optimizer.lr=2e-3", "checkpoint.keep=3", "model.recompute.granularity=full"])
    found = {d.key: d for d in list_differences(old, new)}
    assert found["optimizer.lr"].new == 2e-3 and not found["optimizer.lr"].is_free_on_resume
    assert found["checkpoint.keep"].is_free_on_resume
    assert (found["model.recompute.granularity"].old, found["model.recompute.granularity"].new) == (
        None,
        "full",
    )
    assert str(found["checkpoint.keep"]) == "checkpoint.keep: 2 -> 3"


def test_a_recipe_is_frozen():
    recipe: Recipe = load("demo")
    with pytest.raises(ValidationError):
        recipe.seed = 3  # type: ignore[misc]


def test_steps_within_the_warm_up_are_refused_with_an_override_that_works():
    (line,) = violations("train.steps=12")
    override = re.search(r"--set (optimizer\.\S+)", line)
    assert override and load("demo", ["train.steps=12", override[1]]).train.steps == 12
    assert load("demo", ["train.steps=1", "optimizer.warmup_steps=0"]).train.steps == 1


@pytest.mark.parametrize(("samples", "steps"), [(1, 1), (16, 1), (17, 2), (4800, 300), (4801, 301)])
def test_samples_instead_of_steps_are_rounded_up_to_whole_steps(samples, steps):
    given = [f"train.samples={samples}", "train.steps=null", "optimizer.warmup_steps=0"]
    train = load("demo", given).train
    assert (train.samples, train.steps, train.global_batch_size) == (samples, steps, 16)
    assert from_mapping(load("demo", given).dump()).train == train


def test_samples_follow_the_batch():
    given = ["train.samples=1000", "train.steps=null", "train.global_batch_size=32"]
    assert load("demo", given).train.steps == 32  # 31.25


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (["train.samples=1000"], "train"),
        (["train.steps=null"], "train"),
        (["train.epochs=2"], "train"),
        (["train.steps=null", "train.epochs=2", "train.samples=9"], "train"),
        (["train.steps=null", "train.epochs=0"], "train.epochs"),
        (["data.weights=[1, 2]"], "data.weights"),
        (["data.weights=[0]"], "data.weights.0"),
        (["data.validation_sets={a.b: {path: x}}"], "data.validation_sets.a.b"),
        (["data.weights=[]"], "data.weights"),
        (["data.tokenizer=gpt2"], "data.tokenizer"),
        (["train.steps=null", "train.samples=0"], "train.samples"),
        (["train.steps=null", "train.samples=true"], "train.samples"),
        (["train.steps=null", "train.samples=9", "train.global_batch_size=0"], "train.global_batch_size"),
    ],
)
def test_lengths_that_cannot_be_are_named_once(given, key, messages):
    (violation,) = map(without_place, violations(*given))
    assert violation.partition(": ")[0] == key
    messages(violation)


@pytest.mark.parametrize(
    ("epochs", "samples", "steps"),
    [(1, 32, 2), (1, 33, 3), (0.5, 64, 2), (3, 100, 19), (0.1, 160, 1), (2.3, 1600, 230)],
)
def test_epochs_become_steps_when_the_samples_are_known(epochs, samples, steps):
    asked = load("demo", ["train.steps=null", f"train.epochs={epochs}", "optimizer.warmup_steps=0"])
    assert asked.train.steps is None
    known = with_epochs_as_steps(asked, samples)
    assert (known.train.steps, known.train.epochs) == (steps, None)
    assert with_epochs_as_steps(known, 7) is known, "what names its steps has them"


def test_a_warm_up_that_the_epochs_are_too_short_for_is_refused_when_that_is_known(messages):
    asked = load("demo", ["train.steps=null", "train.epochs=1", "optimizer.warmup_steps=5"])
    assert with_epochs_as_steps(asked, 96).train.steps == 6
    with pytest.raises(UsageError, match="80 samples") as error:
        with_epochs_as_steps(asked, 80)
    assert "optimizer.warmup_steps: 5 " in str(error.value)
    messages(error.value)
