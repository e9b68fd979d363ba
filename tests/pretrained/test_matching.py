"""Everything that is wrong with a directory's weights is said at once, by name, before anything is read."""

import json
from typing import Any

import pytest

from bundle.errors import UsageError
from bundle.planning.inputs import find_input_output_problems, inspect_weights
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


def test_missing_extra_and_misshaped_tensors_are_listed_together(tmp_path, messages):
    (of,) = write(tmp_path).values()
    shapes = {name: tuple(value["shape"]) for name, value in of.items()}
    missing, extra = "model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.k_norm.weight"
    transposed = "model.layers.1.mlp.down_proj.weight"
    del shapes[missing], shapes["model.layers.2.mlp.up_proj.weight"]
    shapes |= {extra: (16,), transposed: (80, 48)}
    write_file(tmp_path / "model.safetensors", header(shapes))
    assert {line.split()[0] for line in refused(tmp_path).violations} == {missing, extra, transposed}
    messages(refused(tmp_path))
    problems = [problem.text for problem in find_input_output_problems(recipe(tmp_path), tmp_path / "run")]
    assert all(any(reason in text for text in problems) for reason in refused(tmp_path).violations)


def test_truncated_files_are_named_with_their_tensors(tmp_path, messages):
    files = write(tmp_path, shards=3)
    first, second, third = (tmp_path / file for file in files)
    first.write_bytes(first.read_bytes()[:-3])
    second.write_bytes(second.read_bytes()[:20])
    third.unlink()
    said = refused(tmp_path)
    messages(said)
    last = list(files[first.name])[-1]
    assert f"{first.name}: {last} is truncated" in str(said)
    assert f"{second.name}: truncated" in str(said) and f"{third.name}: No such file" in str(said)
    assert len(said.violations) == 3


def test_a_directory_without_weights_begins_with_random_ones_unless_they_are_asked_for(tmp_path, messages):
    write(tmp_path)
    assert find_recipe_weights(recipe(tmp_path, weights="random")) is None
    (tmp_path / "model.safetensors").unlink()
    assert find_recipe_weights(recipe(tmp_path)) is None
    messages(refused(tmp_path, weights="load"))
    job = recipe(tmp_path)
    (tmp_path / "config.json").unlink()
    tmp_path.rmdir()
    with pytest.raises(UsageError, match="directory") as error:
        find_recipe_weights(job)
    messages(error.value)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "consolidated.00.pth", "model-00001-of-00002.safetensors"]
)
def test_weights_of_another_kind_are_not_taken_for_none(tmp_path, name, messages):
    write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    assert name in str(refused(tmp_path))
    messages(refused(tmp_path))
    assert find_recipe_weights(recipe(tmp_path, weights="random")) is None


def test_layers_of_prediction_that_are_not_there_are_named_with_the_remedy(tmp_path, messages):
    write(tmp_path, "glm4_moe")
    job = {"mtp": {"layers": 0}}
    assert find_recipe_weights(recipe(tmp_path)) is not None
    assert find_recipe_weights(recipe(tmp_path, **job)) is not None, "what is not trained may be there"
    config = CONFIGS["glm4_moe"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    remedy = refused(tmp_path).violations[-1]
    assert "model.mtp.layers: 0" in remedy
    messages(remedy)
    assert find_recipe_weights(recipe(tmp_path, **job)) is not None
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    (extra,) = (line for line in refused(tmp_path).violations if "layers.4.eh_proj" in line)
    messages(extra)
    assert find_recipe_weights(recipe(tmp_path, mtp={"layers": 1}, config=config)) is not None


def test_copies_and_old_constants_may_be_there(tmp_path, messages):
    copies: dict[str, tuple[int, ...]] = {
        "model.layers.4.embed_tokens.weight": (100, 48),
        "model.layers.4.shared_head.head.weight": (100, 48),
    }
    write(tmp_path, "glm4_moe", more=copies | {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)})
    assert find_recipe_weights(recipe(tmp_path)) is not None
    write(tmp_path, "glm4_moe", more={"model.layers.4.embed_tokens.weight": (100, 47)})
    assert "[100, 47]" in str(refused(tmp_path)) and "[100, 48]" in str(refused(tmp_path))
    messages(refused(tmp_path))


def test_only_floating_point_numbers_are_read(tmp_path, messages):
    (of,) = write(tmp_path).values()
    shapes = {name: tuple(value["shape"]) for name, value in of.items()}
    write_file(tmp_path / "model.safetensors", header(shapes, "I8"))
    violations = refused(tmp_path).violations
    assert len(violations) == len(shapes) and all("I8" in line for line in violations)
    messages(violations[0])


def test_names_of_files_stay_in_the_directory(tmp_path, messages):
    inside = tmp_path / "model"
    files = write(inside, shards=2)
    outside = tmp_path / "stolen.safetensors"
    (inside / next(iter(files))).rename(outside)
    odd: tuple[Any, ...] = ("../stolen.safetensors", str(outside), "..", "", "a.bin", 3, None)
    for name in odd:
        write_index(inside, {name: files[next(iter(files))], **dict(list(files.items())[1:])})
        assert all("safetensors file" in line for line in refused(inside).violations)
    messages(refused(inside).violations[0])


def test_an_index_that_contradicts_the_files_is_refused(tmp_path, messages):
    files = write(tmp_path, shards=2)
    (one, of), (two, other) = files.items()
    moved, gone = next(iter(of)), next(iter(other))
    del of[moved], other[gone]
    write_index(tmp_path, {one: of | {"no.such": 0}, two: other | {moved: 0}})
    said = refused(tmp_path)
    assert {line.split()[0] for line in said.violations} >= {moved, "no.such"}
    messages(said)


@pytest.mark.parametrize(
    ("quantization", "value"),
    [
        ({"quant_method": "awq"}, "awq"),
        ("fp8", "quant_method"),
        ({"quant_method": "fp8"}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "[0, 128]"),
    ],
)
def test_other_quantisation_is_refused_by_name(tmp_path, quantization, value, messages):
    write(tmp_path)
    error = refused(tmp_path, config=CONFIGS["qwen2"] | {"quantization_config": quantization})
    assert value in str(error)
    messages(error)


def test_scales_fit_their_tensors(tmp_path, messages):
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
    assert "scale_inv is F32 [3, 2]" in said((3, 2)) and "[3, 3]" in said((3, 2))
    assert "scale_inv is I8 [3, 3]" in said((3, 3), "I8")
    assert fp8 in said(()) and "F8_E4M3" in said(())
    for case in (said((3, 2)), said((3, 3), "I8"), said(())):
        messages(case)


def test_a_plan_says_what_a_model_begins_with(tmp_path, messages):
    write(tmp_path)
    loaded = inspect_weights(recipe(tmp_path)).description
    assert loaded.startswith(f"{tmp_path}: ") and loaded.endswith(" GiB") and " tensors, " in loaded
    drawn = [inspect_weights(recipe(tmp_path, weights="random")).description]
    (tmp_path / "model.safetensors").unlink()
    drawn += [inspect_weights(recipe(tmp_path, path=path)).description for path in (str(tmp_path), None)]
    for description, reason in zip(drawn, ("model.weights", str(tmp_path), "model.path"), strict=True):
        assert description.startswith("random weights") and reason in description
        messages(description)
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
