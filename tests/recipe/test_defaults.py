"""What a recipe leaves out: from the model's directory and the task."""

import json

import pytest

from bundle.errors import UsageError
from bundle.recipe import differences, from_mapping, load
from tests.data import chat
from tests.journeys.checkpoints import CONFIGS

QWEN3 = CONFIGS["qwen3"]


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
    assert again == found and not differences(found, again) and not again.origins


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
    assert not {"data.tokenizer", "data.template"} & set(written.origins)


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
    assert recipe(model, "model.lora.rank=8", "model.lora.targets=[q_proj]").model.lora.alpha == 32


def test_the_demo_keeps_its_keys():
    demo = load("demo")
    assert (demo.data.tokenizer, demo.data.template, demo.data.packed) == ("bytes", "plain", False)
    assert demo.optimizer.dump() | {"lr": 1, "min_lr": 1, "warmup_steps": 1} == type(
        demo.optimizer
    )().dump() | {"lr": 1, "min_lr": 1, "warmup_steps": 1}
