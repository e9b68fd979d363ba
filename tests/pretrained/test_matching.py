"""Everything that is wrong with a directory's weights is said at once, by name, before anything is read."""

import json
from typing import Any

import pytest

from bundle.errors import UsageError
from bundle.planning.inputs import find_input_problems, inspect_weights
from bundle.pretrained import find_recipe_weights
from tests.pretrained.directories import header, recipe, write, write_file, write_index
from tests.reference.configs import CONFIGS


def refused(directory, **model):
    with pytest.raises(UsageError) as error:
        find_recipe_weights(recipe(directory, **model))
    return error.value


@pytest.mark.parametrize("shards", [1, 3])
def test_a_whole_directory_is_taken(tmp_path, shards):
    files = write(tmp_path, shards=shards)
    found = find_recipe_weights(recipe(tmp_path))
    assert found is not None
    assert found.entries.keys() == {name for of in files.values() for name in of}
    assert found.bytes == sum(
        value["data_offsets"][1] - value["data_offsets"][0] for of in files.values() for value in of.values()
    )


def test_missing_extra_and_misshaped_tensors_are_listed_together(tmp_path):
    (of,) = write(tmp_path).values()
    shapes = {name: tuple(value["shape"]) for name, value in of.items()}
    del shapes["model.layers.0.mlp.up_proj.weight"], shapes["model.layers.2.mlp.up_proj.weight"]
    shapes["model.layers.1.self_attn.k_norm.weight"] = (16,)
    shapes["model.layers.1.mlp.down_proj.weight"] = (80, 48)  # transposed
    write_file(tmp_path / "model.safetensors", header(shapes))
    assert set(refused(tmp_path).violations) == {
        "model.layers.0.mlp.up_proj.weight is missing (and 1 more like model.layers.#.mlp.up_proj.weight)",
        "model.layers.1.self_attn.k_norm.weight is no tensor of this model",
        "model.layers.1.mlp.down_proj.weight is [80, 48], the model's is [48, 80]",
    }
    problems = [problem.text for problem in find_input_problems(recipe(tmp_path), tmp_path / "run")]
    assert all(any(reason in text for text in problems) for reason in refused(tmp_path).violations)


def test_truncated_files_are_named_with_their_tensors(tmp_path):
    files = write(tmp_path, shards=3)
    first, second, third = (tmp_path / file for file in files)
    first.write_bytes(first.read_bytes()[:-3])
    second.write_bytes(second.read_bytes()[:20])
    third.unlink()
    said = str(refused(tmp_path))
    last = list(files[first.name])[-1]
    assert f"{first.name}: {last} is truncated" in said
    assert f"{second.name}: truncated, or no safetensors" in said
    assert f"{third.name}: No such file or directory" in said
    assert len(refused(tmp_path).violations) == 3


def test_a_directory_without_weights_begins_with_random_ones_unless_they_are_asked_for(tmp_path):
    write(tmp_path)
    assert find_recipe_weights(recipe(tmp_path, weights="random")) is None
    (tmp_path / "model.safetensors").unlink()
    assert find_recipe_weights(recipe(tmp_path)) is None
    assert "there are no weights" in str(refused(tmp_path, weights="load"))
    job = recipe(tmp_path)
    (tmp_path / "config.json").unlink()
    tmp_path.rmdir()
    with pytest.raises(UsageError, match="is no directory"):
        find_recipe_weights(job)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "consolidated.00.pth", "model-00001-of-00002.safetensors"]
)
def test_weights_of_another_kind_are_not_taken_for_none(tmp_path, name):
    write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    assert f"holds {name}, but neither model.safetensors" in str(refused(tmp_path))
    assert find_recipe_weights(recipe(tmp_path, weights="random")) is None


def test_layers_of_prediction_that_are_not_there_are_named_with_the_remedy(tmp_path):
    write(tmp_path, "glm4_moe")
    job = {"mtp": {"layers": 0}}
    assert find_recipe_weights(recipe(tmp_path)) is not None
    assert find_recipe_weights(recipe(tmp_path, **job)) is not None, "what is not trained may be there"
    config = CONFIGS["glm4_moe"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    assert refused(tmp_path).violations[-1].endswith("model.mtp.layers: 0 trains without it")
    assert find_recipe_weights(recipe(tmp_path, **job)) is not None
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    assert "model.layers.4.eh_proj.weight is no tensor of this model" in refused(tmp_path).violations
    assert find_recipe_weights(recipe(tmp_path, mtp={"layers": 1}, config=config)) is not None


def test_copies_and_old_constants_may_be_there(tmp_path):
    copies: dict[str, tuple[int, ...]] = {
        "model.layers.4.embed_tokens.weight": (100, 48),
        "model.layers.4.shared_head.head.weight": (100, 48),
    }
    write(tmp_path, "glm4_moe", more=copies | {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)})
    assert find_recipe_weights(recipe(tmp_path)) is not None
    write(tmp_path, "glm4_moe", more={"model.layers.4.embed_tokens.weight": (100, 47)})
    assert "is [100, 47], the model's is [100, 48]" in str(refused(tmp_path))


def test_only_floating_point_numbers_are_read(tmp_path):
    (of,) = write(tmp_path).values()
    shapes = {name: tuple(value["shape"]) for name, value in of.items()}
    write_file(tmp_path / "model.safetensors", header(shapes, "I8"))
    assert len(refused(tmp_path).violations) == len(shapes)
    assert "is I8: only F32, BF16, F16, F8_E4M3 and MXFP4 are read" in refused(tmp_path).violations[0]


def test_names_of_files_stay_in_the_directory(tmp_path):
    inside = tmp_path / "model"
    files = write(inside, shards=2)
    outside = tmp_path / "stolen.safetensors"
    (inside / next(iter(files))).rename(outside)
    odd: tuple[Any, ...] = ("../stolen.safetensors", str(outside), "..", "", "a.bin", 3, None)
    for name in odd:
        write_index(inside, {name: files[next(iter(files))], **dict(list(files.items())[1:])})
        said = str(refused(inside))
        assert "is no name of a safetensors file in this directory" in said


def test_an_index_that_contradicts_the_files_is_refused(tmp_path):
    files = write(tmp_path, shards=2)
    (one, of), (two, other) = files.items()
    moved, gone = next(iter(of)), next(iter(other))
    del of[moved], other[gone]
    write_index(tmp_path, {one: of | {"no.such": 0}, two: other | {moved: 0}})
    said = refused(tmp_path).violations
    assert f"{moved} is in {one}, model.safetensors.index.json has it in {two}" in said
    assert f"no.such is not in {one}, where model.safetensors.index.json has it" in said


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq': only mxfp4, and fp8 with blocks, are read"),
        ("fp8", "quant_method None"),
        ({"quant_method": "fp8"}, "weight_block_size None: must be two sizes"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size [0, 128]"),
    ],
)
def test_other_quantisation_is_refused_by_name(tmp_path, quantization, said):
    write(tmp_path)
    assert said in str(refused(tmp_path, config=CONFIGS["qwen2"] | {"quantization_config": quantization}))


def test_scales_fit_their_tensors(tmp_path):
    (of,) = write(tmp_path).values()
    shapes = {name: tuple(value["shape"]) for name, value in of.items()}
    fp8 = "model.layers.0.mlp.gate_proj.weight"
    config = CONFIGS["qwen2"] | {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 16]}
    }

    def said(scale, dtype="F32"):
        rest = header({name: shape for name, shape in shapes.items() if name != fp8})
        at = max(value["data_offsets"][1] for value in rest.values())
        for name, shape, kind in ((fp8, shapes[fp8], "F8_E4M3"), (f"{fp8}_scale_inv", scale, dtype)):
            if shape:
                one = header({name: shape}, kind)[name]
                one["data_offsets"] = [at + offset for offset in one["data_offsets"]]
                rest[name], at = one, one["data_offsets"][1]
        write_file(tmp_path / "model.safetensors", rest)
        try:
            return find_recipe_weights(recipe(tmp_path, config=config)) and ""
        except UsageError as error:
            return str(error)

    assert said((3, 3)) == ""
    assert "_scale_inv is F32 [3, 2], must be [3, 3] numbers" in said((3, 2))
    assert "_scale_inv is I8 [3, 3], must be" in said((3, 3), "I8")
    assert f"{fp8} is F8_E4M3 without _scale_inv" in said(())


def test_a_plan_says_what_a_model_begins_with(tmp_path):
    write(tmp_path)
    loaded = inspect_weights(recipe(tmp_path)).description
    assert loaded.startswith(f"{tmp_path}: ") and loaded.endswith(" GiB") and " tensors, " in loaded
    assert (
        inspect_weights(recipe(tmp_path, weights="random")).description
        == "random weights: model.weights says so"
    )
    (tmp_path / "model.safetensors").unlink()
    assert inspect_weights(recipe(tmp_path)).description == f"random weights: {tmp_path} holds none"
    assert (
        inspect_weights(recipe(tmp_path, path=None)).description
        == "random weights: the recipe names no model.path"
    )
    assert not inspect_weights(recipe(tmp_path, weights="load")).description


@pytest.mark.parametrize(
    "name", ["Qwen2ForSequenceClassification", "Qwen2ForTokenClassification", "MyRewardModel"]
)
@pytest.mark.parametrize("has_weights", [True, False])
def test_a_checkpoint_of_another_head_is_refused_by_its_class(tmp_path, name, has_weights):
    (file,) = write(tmp_path)
    if not has_weights:
        (tmp_path / file).unlink()
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {"architectures": [name]}))
    (said,) = [problem.text for problem in inspect_weights(recipe(tmp_path)).problems]
    assert said.startswith("model.path: ") and name in said and "Qwen2ForCausalLM" in said
    assert not inspect_weights(recipe(tmp_path, weights="random")).problems


@pytest.mark.parametrize(
    "named", [["Qwen3ForCausalLM"], ["Mine"], ["Qwen3ForCausalLMEagle3"], [], [3], "Qwen3"]
)
def test_other_names_of_a_class_say_nothing(tmp_path, named):
    write(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {"architectures": named}))
    assert find_recipe_weights(recipe(tmp_path)) is not None
