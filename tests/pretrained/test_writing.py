"""A written directory reads back as it was written, with all that belongs to it."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from bundle.pretrained import find_weights, writing
from bundle.pretrained.writing import (
    OutputTensorHeader,
    SafetensorsFileWriter,
    build_file_names,
    split_into_files,
)
from tests.pretrained.directories import recipe, write

TENSORS = [
    OutputTensorHeader("a", "BF16", (3, 5)),
    OutputTensorHeader("b", "F32", (7,)),
    OutputTensorHeader("c", "BF16", (2, 2)),
    OutputTensorHeader("d", "F32", ()),
]


def written(directory: Path, largest: int) -> dict[str, list[OutputTensorHeader]]:
    of = dict(
        zip(
            build_file_names(len(list(split_into_files(TENSORS, largest)))),
            split_into_files(TENSORS, largest),
            strict=True,
        )
    )
    for name, share in of.items():
        file = SafetensorsFileWriter(directory / name, share)
        for tensor in share:
            file.append(tensor.name.encode() * tensor.bytes)
        file.close()
    writing.write_index_if_sharded(directory, of)
    return of


@pytest.mark.parametrize(("largest", "files"), [(10**9, 1), (58, 2), (1, 4)])
def test_what_is_written_reads_back(tmp_path, largest, files):
    assert len(written(tmp_path, largest)) == files
    found = find_weights(tmp_path)
    assert found is not None
    assert {name: (e.dtype, e.shape) for name, e in found.entries.items()} == {
        t.name: (t.dtype, t.shape) for t in TENSORS
    }
    for name, entry in found.entries.items():
        assert entry.file.read_bytes()[entry.start : entry.stop] == name.encode() * (entry.stop - entry.start)


def test_safetensors_reads_it(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    pytest.importorskip("torch")
    written(tmp_path, 10**9)
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert sorted(file.keys()) == ["a", "b", "c", "d"]
        assert tuple(file.get_slice("a").get_shape()) == (3, 5)


def written_config(directory, job, numbers):
    model = writing.PublishedModel(job.model.config, job.architecture)
    writing.write_config(directory / "out", model, numbers)


def test_the_config_is_as_it_was_published_but_for_what_changed(tmp_path):
    write(tmp_path, "glm4_moe")
    published = json.loads((tmp_path / "config.json").read_text())
    stored = published | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    (tmp_path / "out").mkdir()
    written_config(tmp_path, recipe(tmp_path, mtp={"layers": 3}), "bf16")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    changed = {"torch_dtype": "bfloat16", "num_nextn_predict_layers": 3}
    assert said == published | changed | {"architectures": ["Glm4MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(
        json.dumps(published | {"dtype": "float16", "architectures": ["Mine"]})
    )
    written_config(tmp_path, recipe(tmp_path), "fp32")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (said["dtype"], said["architectures"], "torch_dtype" in said) == ("float32", ["Mine"], False)


@pytest.mark.parametrize(
    ("family", "chosen"),
    [("deepseek_v3", ("sigmoid", "noaux_tc")), ("deepseek_v2", ("softmax", "greedy"))],
)
def test_servers_find_what_published_configs_say_and_transformers_leaves_out(tmp_path, family, chosen):
    """SGLang 0.5.16 reads these of the config and knows no default: seen on a GPU."""
    write(tmp_path, family)
    place = tmp_path / "config.json"
    left_out = ("moe_layer_freq", "scoring_func") + (("topk_method",) if family == "deepseek_v3" else ())
    kept = {key: value for key, value in json.loads(place.read_text()).items() if key not in left_out}
    place.write_text(json.dumps(kept))
    (tmp_path / "out").mkdir()
    written_config(tmp_path, recipe(tmp_path), "bf16")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["moe_layer_freq"] == 1 and (said["scoring_func"], said["topk_method"]) == chosen
    place.write_text(json.dumps(kept | {"moe_layer_freq": 2}))
    written_config(tmp_path, recipe(tmp_path), "bf16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["moe_layer_freq"] == 2


MODEL = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "generation_config.json",
    "preprocessor_config.json", "modeling_mine.py", "tokenization_mine.py", "config.json",
    "model.safetensors", "x.bin",
)  # fmt: skip
TOKENIZER = (
    "tokenizer.json",
    "vocab.json",
    "preprocessor_config.json",
    "tokenization_mine.py",
    "config.json",
)


def holding(directory: Path, names: Sequence[str]) -> Path:
    """A directory of files that hold its name."""
    directory.mkdir()
    for name in names:
        (directory / name).write_text(directory.name)
    return directory


def test_the_tokenizer_that_trained_comes_along_whole_and_the_rest_of_its_model(tmp_path):
    """Of two tokenizers nothing is mixed: the model's own chat template is not what it was trained with."""
    model, own, out = (
        holding(tmp_path / "model", MODEL),
        holding(tmp_path / "own", TOKENIZER),
        tmp_path / "out",
    )
    write(tmp_path / "config")
    job = recipe(tmp_path / "config").model_copy(deep=True)

    def belongings(**tokenizer) -> dict[str, str]:
        paths = {"model": job.model.model_copy(update={"path": str(model)})}
        made = job.model_copy(update=paths | {"data": job.data.model_copy(update=tokenizer)})
        out.mkdir()
        writing.copy_extra_files(writing.PublishedModel.from_recipe(made), out)
        found = {path.name: path.read_text() for path in out.iterdir()}
        shutil.rmtree(out)
        return found

    of_model = {"generation_config.json", "preprocessor_config.json", "modeling_mine.py"}
    assert belongings(tokenizer=f"hf:{own}") == {
        **dict.fromkeys(("tokenizer.json", "vocab.json", "tokenization_mine.py"), "own"),
        **dict.fromkeys(of_model, "model"),
    }
    everything = dict.fromkeys((*of_model, *TOKENIZER[:1], *MODEL[1:4], "tokenization_mine.py"), "model")
    assert belongings(tokenizer=f"hf:{model}") == belongings(tokenizer="bytes") == everything


def test_a_model_without_its_tokenizer_says_so(tmp_path, caplog, messages):
    write(tmp_path / "model")
    job = recipe(tmp_path / "model")
    (tmp_path / "out").mkdir()
    writing.write_remaining_files(tmp_path / "out", writing.PublishedModel.from_recipe(job), "bf16", {})
    (warning,) = [record.getMessage() for record in caplog.records if "tokenizer" in record.getMessage()]
    messages(warning)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]
