"""Experts that are one tensor of a layer, as on the Hub and as transformers 5 writes them: the same model."""

import copy
from dataclasses import replace

import pytest
from safetensors.torch import save_file

pytest.importorskip("megatron.core")
import torch

from bundle.architectures import from_config
from bundle.architectures.tensors import Tensors
from bundle.errors import UsageError
from bundle.models.mapped_files import MappedFiles
from bundle.pretrained.directory import find_weights
from bundle.pretrained.matching import _check_weights_match
from tests.families.cases import CASES as OF_TEXT
from tests.vision.cases import CASES

GPT_OSS = next(case for case in OF_TEXT if case.family == "gpt_oss")

CONFIG = next(case.config for case in CASES if case.family == "qwen3_vl_moe")
HIDDEN = from_config(CONFIG).hidden_size


def table(width):
    """Of a model whose experts are so wide."""
    read = from_config(CONFIG)
    assert read.moe is not None
    return Tensors(replace(read, moe=replace(read.moe, ffn_hidden_size=width)))


def written(directory, of, turned):
    """Random weights; those stacks lie turned whose names end with one of these."""
    directory.mkdir()
    torch.manual_seed(1)
    shapes = dict(pair for tensor in of for pair in tensor.list_published_shapes())
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    stored = {name: x.mT.contiguous() if name.endswith(turned) else x for name, x in values.items()}
    save_file(stored, directory / "model.safetensors")
    found = find_weights(directory)
    assert found is not None
    return values, found


@pytest.mark.parametrize(
    "width", [20, HIDDEN, HIDDEN // 2], ids=["", "down is square", "gate and up are square"]
)
@pytest.mark.parametrize("turned", [(), ("gate_up_proj", "down_proj")], ids=["on the Hub", "transformers 5"])
def test_both_ways_are_read(tmp_path, width, turned):
    values, found = written(tmp_path / "of", table(width), turned)
    matched, files = _check_weights_match(found, CONFIG, table(width), 0, "other weights"), MappedFiles()
    read = {name: files.read_tensor(name, entry) for name, entry in matched.entries.items()}
    assert read.keys() == values.keys()
    assert [name for name in values if not torch.equal(read[name], values[name])] == []


@pytest.mark.parametrize("turned", [("gate_up_proj",), ("down_proj",)])
def test_each_matrix_says_how_it_lies(tmp_path, turned):
    test_both_ways_are_read(tmp_path, 20, turned)


def test_gpt_oss_lies_one_way(tmp_path, messages):
    config = GPT_OSS.config | {"model_type": "gpt_oss"}
    of = Tensors(from_config(config))
    _, found = written(tmp_path / "of", of, ("gate_up_proj", "down_proj"))
    with pytest.raises(UsageError) as refused:
        _check_weights_match(found, config, of, 0, "other weights")
    assert any("gate_up_proj" in line for line in refused.value.violations)
    messages(refused.value)


def test_what_transformers_saves_is_what_was_imported_and_exported(tmp_path, capfd):
    """transformers 5 turns the stacks, which the Hub does not: `weights diff` compares the models."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    from tests.cli.test_weights import run

    torch.manual_seed(2)
    config = AutoConfig.for_model(**copy.deepcopy(dict(CONFIG)))
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5, 0.2)
    theirs, between, out = (tmp_path / name for name in ("theirs", "between", "out"))
    model.save_pretrained(theirs)
    assert run("import", theirs, between) == 0
    assert run("export", between, out, "--like", theirs) == 0
    for one, other in ((theirs, out), (theirs, between), (out, between), (out, theirs)):
        assert run("diff", one, other) == 0, capfd.readouterr().out
    with torch.no_grad():
        next(x for name, x in model.named_parameters() if name.endswith("experts.down_proj"))[1, 2, 3] += 1
    model.save_pretrained(theirs)
    assert run("diff", theirs, out) == 1
    assert "1 of" in capfd.readouterr().out
