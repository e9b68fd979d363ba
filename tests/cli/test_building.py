"""A recipe from a model and a data file: what is chosen, what a user's own keys change, what is refused."""

import json
from pathlib import Path

import pytest

from bundle.cli.building import TARGET_MIN_EPOCH_STEPS, TaskSpec, build_recipe
from bundle.cli.request import JobRequest
from bundle.errors import BundleError, UsageError
from bundle.recipe import load
from tests.command import NO_GPU, run_bundle, sets
from tests.journeys import checkpoints


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return checkpoints.write_checkpoint("qwen3", tmp_path_factory.mktemp("model") / "Tiny-Qwen3")


@pytest.fixture
def chats(tmp_path) -> Path:
    return checkpoints.write_lines(tmp_path / "chats.jsonl", checkpoints.chats(8))


def build(place: Path, *overrides: str, task: str = "sft", data: Path, model: Path, **more):
    request = JobRequest(overrides=list(overrides), run_directory=place / "run")
    return build_recipe(TaskSpec(task, str(model), [str(data)], request=request, **more))


def test_the_longest_row_decides_the_length_and_the_task_the_epochs(model, chats, tmp_path):
    built = build(tmp_path, data=chats, model=model)
    recipe, lengths = built.recipe, built.corpus.stores[0].lengths
    assert recipe.data.sequence_length == 64 and 32 < lengths.max() <= 64
    assert (recipe.task, recipe.train.epochs, recipe.train.global_batch_size) == ("sft", 3, 1)
    assert (recipe.name, recipe.model.weights) == ("run", "load")
    assert TaskSpec("dpo", "hub/Tiny_3!", [], lora=True).run_name == "dpo-lora-tiny_3-"


def test_more_data_makes_longer_packs_and_larger_batches(model, tmp_path):
    rows = checkpoints.write_lines(tmp_path / "many.jsonl", checkpoints.chats(8) * 400)
    built = build(tmp_path, data=rows, model=model)
    train, count = built.recipe.train, len(built.corpus.training)
    assert built.recipe.data.packed and built.recipe.data.sequence_length == 256
    assert TARGET_MIN_EPOCH_STEPS <= count / train.global_batch_size < 2 * TARGET_MIN_EPOCH_STEPS


def test_what_a_user_sets_wins_and_is_no_choice(model, chats, tmp_path):
    keys = ("data.sequence_length=128", "train.steps=5", "train.global_batch_size=6", "model.dtype=fp32")
    built = build(tmp_path, *keys, data=chats, model=model)
    recipe, reasons = built.recipe, {choice.key: choice.reason for choice in built.choices}
    assert (recipe.data.sequence_length, recipe.train.steps, recipe.train.epochs) == (128, 5, None)
    assert recipe.train.global_batch_size == 6
    assert {reasons[key.partition("=")[0]] for key in keys} == {"--set"} and "train.epochs" not in reasons


def test_defaults_that_decide_the_training_are_choices_with_their_origin(model, chats, tmp_path):
    built = build(tmp_path, "model.lora.rank=8", data=chats, model=model, lora=True)
    found = {choice.key: choice for choice in built.choices}
    assert len(found) == len(built.choices)
    assert found["data.tokenizer"].value == f"hf:{model}"
    assert found["data.tokenizer"].reason == built.recipe.origins["data.tokenizer"] == "model.path"
    assert (found["data.template"].value, found["optimizer.lr"].value) == ("chat", 1e-4)
    assert (found["model.lora.rank"].value, found["model.lora.rank"].reason) == (8, "--set")
    assert found["model.lora.alpha"].value == 32 and "model.lora" not in found
    assert found["checkpoint.export"].value == built.recipe.checkpoint.export == "hf"


def test_a_row_beyond_the_models_positions_is_named(model, chats, tmp_path, messages):
    chats.write_text(chats.read_text() + json.dumps(checkpoints.chats(200)[-1]) + "\n")
    with pytest.raises(BundleError, match=r"data\.truncation") as error:
        build(tmp_path, data=chats, model=model)
    assert f"{chats}:9" in str(error.value)
    messages(error.value)
    deleted = build(tmp_path, "data.truncation=delete", data=chats, model=model)
    assert deleted.corpus.left_out.deleted == 1 and deleted.recipe.data.sequence_length == 64


def test_a_pair_of_the_longest_answers_fits_a_pack(model, tmp_path):
    pairs = checkpoints.write_lines(tmp_path / "pairs.jsonl", checkpoints.pairs(8))
    built = build(tmp_path, "data.packed=true", task="dpo", data=pairs, model=model)
    longest = built.corpus.stores[0].lengths.max()
    assert 2 * longest <= built.recipe.data.sequence_length < 8 * longest
    assert (built.recipe.task, built.recipe.train.epochs) == ("dpo", 1)


def test_text_is_cut_into_as_long_samples_as_there_is_data_for(model, tmp_path):
    for count, length in ((300, 64), (9000, 128)):
        text = tmp_path / f"{count}.jsonl"
        text.write_text(json.dumps({"text": "a b c d " * count}) + "\n")
        recipe = build(tmp_path, task="pretrain", data=text, model=model).recipe
        assert (recipe.data.sequence_length, recipe.train.epochs) == (length, 1)


@pytest.mark.parametrize("missing", ["model", "data", "weights", "room"])
def test_inputs_that_cannot_be_used_are_refused_before_anything_is_written(missing, model, chats, tmp_path):
    place = tmp_path / "new"
    given = {"data": chats, "model": model}
    if missing == "room":
        (place / "run").mkdir(parents=True)
        (place / "run/theirs.txt").touch()
        with pytest.raises(UsageError, match=r"theirs\.txt"):
            build(place, **given)
        assert [path.name for path in place.rglob("*")] == ["run", "theirs.txt"]
        return
    if missing == "weights":
        given["model"] = tmp_path / "config"
        given["model"].mkdir()
        for file in model.glob("*.json*"):
            (given["model"] / file.name).write_bytes(file.read_bytes())
    else:
        given[missing] = tmp_path / "nowhere"
    with pytest.raises(UsageError):
        build(place / "deep", **given)
    assert not place.exists()


def test_a_model_too_large_for_one_device_is_divided(model, tmp_path):
    """By the plan for 8 H200, whose optimizer state is divided anyway; megatron's weights are not."""
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "a b c d " * 300}) + "\n")
    sizes = {}
    for name in ("sft-qwen3-8b-h200", "sft-llama3.1-70b-h200", "sft-qwen3-30b-a3b-h200"):
        place = tmp_path / name
        place.mkdir()
        config = load(name).model.config
        (place / "config.json").write_text(json.dumps(config))
        tokenizer = f"data.tokenizer=hf:{model}"
        built = build(tmp_path, tokenizer, task="pretrain", data=text, model=place, hardware="h200")
        parallel, batch = built.recipe.parallel, built.recipe.train.global_batch_size
        sizes[name] = (parallel.tp, parallel.ep, batch)
    assert sizes == {
        "sft-qwen3-8b-h200": (1, 1, 8),
        "sft-llama3.1-70b-h200": (8, 1, 1),
        "sft-qwen3-30b-a3b-h200": (1, 2, 8),
    }


def test_init_writes_adapters_of_a_rank_that_a_user_sets(model, chats, tmp_path):
    words = ("init", f"--model={model}", f"--data={chats}", "--lora", *sets("model.lora.rank=8"))
    run_bundle(*words, cwd=tmp_path, code=0, environment=NO_GPU)
    lora = load(tmp_path / "recipe.yaml").model.lora
    assert lora is not None and (lora.rank, lora.alpha) == (8, 32)


@pytest.mark.slow
def test_init_writes_a_recipe_that_plan_and_check_take(model, chats, tmp_path):
    words = ("init", f"--model={model}", f"--data={chats}", *sets("optimizer.lr=2e-4"))
    run_bundle(*words, cwd=tmp_path, code=0, environment=NO_GPU)
    text = (tmp_path / "recipe.yaml").read_text()
    assert "lr: 0.0002" in text and text.count("# ") >= 10
    built = build_recipe(
        TaskSpec("sft", str(model), [str(chats)], request=JobRequest(overrides=["optimizer.lr=2e-4"]))
    )
    assert load(tmp_path / "recipe.yaml") == built.recipe
    run_bundle("plan", "recipe.yaml", cwd=tmp_path, code=0, environment=NO_GPU)
    run_bundle("check", "recipe.yaml", cwd=tmp_path, code=0, environment=NO_GPU)
    (tmp_path / "recipe.yaml").write_text("mine")
    run_bundle(*words, cwd=tmp_path, code=2, environment=NO_GPU)
    assert (tmp_path / "recipe.yaml").read_text() == "mine"
    run_bundle(*words, "--force", cwd=tmp_path, code=0, environment=NO_GPU)
    assert load(tmp_path / "recipe.yaml") == built.recipe
