"""What a recipe leaves out: from the model's directory and the task."""

import json

import pytest

from bundle.errors import UsageError
from bundle.recipe import flatten, from_mapping, list_differences, load, with_epochs_as_steps
from bundle.recipe.completion import list_shown_settings
from bundle.recipe.defaults import BIAS_UPDATE_RATE_KEY, DEFAULTS_BY_TRAINING_KIND
from bundle.recipe.defaults import KIND_BY_TASK_AND_LORA as KINDS_BY
from tests.data import chat
from tests.journeys.checkpoints import CONFIGS

QWEN3 = CONFIGS["qwen3"]
DEEPSEEK = CONFIGS["deepseek_v3"] | {
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "rms_norm_eps": 1e-6,
}
DEEPSEEK |= {"norm_topk_prob": True, "rope_theta": 10000.0, "scoring_func": "sigmoid"}


@pytest.fixture
def model(tmp_path):
    """A directory as the Hub has them, its weights a name alone."""
    directory = chat.directory(tmp_path / "model")
    (directory / "config.json").write_text(json.dumps(QWEN3))
    (directory / "model.safetensors").touch()
    return directory


def recipe(path, *overrides, **more):
    values = {
        "name": "mine",
        "task": "sft",
        "model": {"path": str(path)},
        "data": {"source": "jsonl", "path": ["rows.jsonl"], "sequence_length": 64},
        "train": {"steps": 100, "global_batch_size": 2},
    }
    return from_mapping(values | more, overrides=overrides)


def refused(*given, **more) -> list[str]:
    with pytest.raises(UsageError) as caught:
        recipe(*given, **more)
    assert caught.value.code == 2
    return [line.rpartition("data.")[2].partition(":")[0] for line in caught.value.violations]


@pytest.mark.parametrize(("task", "template"), [("sft", "chat"), ("dpo", "chat"), ("pretrain", "plain")])
def test_tokenizer_and_template_are_those_of_the_models_directory(model, task, template):
    found = recipe(model, task=task)
    assert (found.data.tokenizer, found.data.template) == (f"hf:{model}", template)
    assert found.origins["data.tokenizer"] == "model.path"
    again = from_mapping(found.dump())
    assert again == found and not list_differences(found, again)
    assert again.origins["data.tokenizer"] == "the recipe"


def test_a_template_is_found_where_transformers_looks_for_one(model, tmp_path):
    (model / "chat_template.jinja").unlink()
    assert recipe(model).data.template == "plain"
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "{{ messages }}"}))
    assert recipe(model).data.template == "chat"
    (model / "tokenizer_config.json").write_text("{")
    assert recipe(model).data.template == "plain"
    other = chat.directory(tmp_path / "other")
    assert recipe(model, f"data.tokenizer=hf:{other}").data.template == "chat"


def test_what_is_written_wins(model, tmp_path):
    written = recipe(model, f"data.tokenizer=hf:{tmp_path}", "data.template=plain")
    assert (written.data.tokenizer, written.data.template) == (f"hf:{tmp_path}", "plain")
    assert {written.origins[key] for key in ("data.tokenizer", "data.template")} == {
        f"--set data.tokenizer=hf:{tmp_path}",
        "--set data.template=plain",
    }


def test_bytes_are_refused_with_the_weights_of_another_tokenizer(model):
    assert refused(model, "data.tokenizer=bytes") == ["tokenizer"]
    assert recipe(model, "data.tokenizer=bytes", "model.weights=random").data.tokenizer == "bytes"
    (model / "model.safetensors").rename(model / "model.safetensors.index.json")
    assert refused(model, "data.tokenizer=bytes") == ["tokenizer"]


def test_a_model_of_bytes_goes_on_with_bytes(model):
    """As the demo is exported: 258 tokens, and no tokenizer beside the weights."""
    for file in [*model.glob("tokenizer*"), model / "chat_template.jinja"]:
        file.unlink()
    assert refused(model, "data.tokenizer=bytes") == ["tokenizer"]
    assert recipe(model).data.tokenizer == f"hf:{model}", "which the plan says that it is not there"
    (model / "config.json").write_text(json.dumps(QWEN3 | {"vocab_size": 258}))
    assert recipe(model).data.tokenizer == recipe(model, "data.tokenizer=bytes").data.tokenizer == "bytes"
    (model / "model.safetensors").unlink()
    (model / "config.json").write_text(json.dumps(QWEN3))
    assert recipe(model).data.tokenizer == "bytes", "where nothing is pretrained"


@pytest.mark.parametrize("lora", [True, {}])
def test_adapters_complete_themselves(model, lora):
    found = recipe(model, model={"path": str(model), "lora": lora}).model.lora
    assert (found.rank, found.alpha) == (16, 32)
    assert set(found.targets) == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    narrow = recipe(model, "model.lora.rank=8", "model.lora.targets=[q_proj]")
    assert narrow.model.lora.alpha == 32


def test_the_demo_keeps_its_keys():
    demo = load("demo")
    assert (demo.data.tokenizer, demo.data.template, demo.data.packed) == ("bytes", "plain", False)
    assert demo.optimizer.dump() | {"lr": 1, "min_lr": 1, "warmup_steps": 1} == type(
        demo.optimizer
    )().dump() | {"lr": 1, "min_lr": 1, "warmup_steps": 1}


# packed, lr, min_lr, warm-up, weight decay, second beta, export
KINDS = [
    ("sft", False, (True, 1e-5, 1e-6, 0.05, 0.1, 0.95, "hf")),
    ("sft", True, (True, 1e-4, 1e-5, 0.05, 0.1, 0.95, "peft")),
    ("dpo", False, (True, 5e-7, 0.0, 0.1, 0.0, 0.999, "hf")),
    ("dpo", True, (True, 5e-6, 0.0, 0.1, 0.0, 0.999, "peft")),
    ("pretrain", False, (False, 1e-5, 1e-6, 0.03, 0.1, 0.95, "hf")),
    ("pretrain", True, (False, 1e-4, 1e-5, 0.05, 0.1, 0.95, "peft")),
]


@pytest.mark.parametrize(("task", "lora", "expected"), KINDS)
def test_each_kind_of_training_has_its_defaults(model, task, lora, expected):
    found = recipe(model, *(["model.lora={}"] if lora else []), task=task)
    optimizer = found.optimizer
    assert (
        found.data.packed,
        *(optimizer.lr, optimizer.min_lr, optimizer.warmup_ratio),
        *(optimizer.weight_decay, optimizer.betas[1], found.checkpoint.export),
    ) == expected
    assert (found.model.dtype, optimizer.schedule, optimizer.clip_grad) == ("bf16", "cosine", 1.0)
    assert optimizer.warmup_steps == 0 and optimizer.count_warmup(100) == 100 * optimizer.warmup_ratio
    assert all(
        default.source in found.origins[default.key]
        for default in DEFAULTS_BY_TRAINING_KIND[KINDS_BY[task, lora]][:3]
    )
    assert from_mapping(found.dump()) == found


@pytest.mark.parametrize(
    ("task", "lora", "rate"), [(*kind[:2], 0.0) for kind in KINDS[:4]] + [("pretrain", False, 1e-3)]
)
def test_a_steering_bias_of_published_weights_stays_in_sft_and_dpo(model, task, lora, rate):
    (model / "config.json").write_text(json.dumps(DEEPSEEK))
    words = ["model.lora={}"] if lora else []
    found = recipe(model, *words, task=task)
    assert found.model.moe.bias_update_rate == rate
    assert (BIAS_UPDATE_RATE_KEY in found.origins) == (task != "pretrain" and not lora)
    if not lora:
        assert recipe(model, f"{BIAS_UPDATE_RATE_KEY}=0.5", task=task).model.moe.bias_update_rate == 0.5


def test_a_model_without_a_steering_bias_has_no_such_default(model):
    assert BIAS_UPDATE_RATE_KEY not in recipe(model).origins


def test_written_keys_win_over_the_defaults_of_the_kind(model):
    keys = {
        "model.dtype": "fp32",
        "data.packed": False,
        "optimizer.lr": 2e-4,
        "optimizer.warmup_steps": 7,
        "optimizer.weight_decay": 0.5,
        "optimizer.betas": (0.8, 0.9),
        "optimizer.clip_grad": 0.0,
        "optimizer.schedule": "linear",
        "checkpoint.export": None,
    }
    found = recipe(model, *(f"{key}={json.dumps(value)}" for key, value in keys.items()))
    values = dict(flatten(found.dump()))
    assert {key: values[key] for key in keys} == keys | {"optimizer.betas": [0.8, 0.9]}
    assert found.optimizer.warmup_ratio is None and found.optimizer.count_warmup(100) == 7
    assert found.optimizer.min_lr == 2e-5, "a tenth of the rate that is written"
    assert all(found.origins[key].startswith("--set ") for key in keys)


def test_rows_stay_unpacked_where_packs_would_be_refused(model):
    several, single = (recipe(model, f"train.micro_batch_size={rows}") for rows in (2, 1))
    assert not several.data.packed and single.data.packed


def test_a_warm_up_is_a_share_of_the_steps_once_they_are_known(model):
    asked = recipe(model, "train.steps=null", "train.epochs=3")
    assert asked.train.steps is None
    known = with_epochs_as_steps(asked, 100)
    assert known.optimizer.warmup_ratio == 0.05 and known.optimizer.count_warmup(known.train.steps) == 8
    longer = recipe(model, "train.steps=2000")
    assert {change.key for change in list_differences(recipe(model), longer)} == {"train.steps"}
    assert recipe(model, "train.steps=1").optimizer.count_warmup(1) == 0
    with pytest.raises(UsageError, match="warmup_ratio"):
        recipe(model, "optimizer.warmup_steps=3", "optimizer.warmup_ratio=0.1")


def test_larger_models_have_lower_rates():
    (rate,) = (default for default in DEFAULTS_BY_TRAINING_KIND["full DPO"] if default.key == "optimizer.lr")
    assert (rate.choose(8e9), rate.choose(7e10), rate.choose(4e11)) == (5e-7, 2e-7, 2e-7)
    (rate,) = (
        default for default in DEFAULTS_BY_TRAINING_KIND["pre-training"] if default.key == "optimizer.lr"
    )
    assert [rate.choose(size) for size in (1.3e8, 1.3e9, 8e9, 1e12)] == [6e-4, 2e-4, 1.2e-4, 6e-5]


def test_a_large_model_that_begins_with_random_weights_has_the_rate_of_its_size(model):
    large = {"hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 8192, "vocab_size": 50304}
    found = recipe(model, task="pretrain", model={"config": QWEN3 | large})
    assert (found.optimizer.lr, found.optimizer.min_lr) == (2e-4, 2e-5)
    assert (found.optimizer.warmup_ratio, found.checkpoint.export) == (0.00125, None)
    assert "pre-training" in found.origins["optimizer.lr"]


def test_the_settings_of_a_recipe_are_told_with_their_origins(model):
    found = recipe(model, "optimizer.lr=1e-4")
    told = {setting.key: setting for setting in list_shown_settings(found.dump(), found.origins)}
    assert told["data.tokenizer"].origin == "model.path"
    assert told["optimizer.lr"][1:] == (1e-4, "--set optimizer.lr=1e-4")
    assert "full SFT" in told["data.packed"].origin and "model.lora.rank" not in told
    adapted = recipe(model, "model.lora.rank=8")
    told = {setting.key: setting for setting in list_shown_settings(adapted.dump(), adapted.origins)}
    assert told["model.lora.rank"].value == 8 and "TRL" in told["model.lora.alpha"].origin
