"""What keeps an export from being written is said once, and what was there before stays."""

import json

import pytest
import torch
from safetensors.torch import load_file

from bundle import files
from bundle.architectures.tensors import Tensors
from bundle.errors import JobFailed
from bundle.models import exporting
from bundle.pretrained.replacing import MANIFEST_FILE_NAME
from tests.checkpoints.faults import full_disk
from tests.models.test_loading import alone as alone
from tests.models.trees import Weight, chunk, groups
from tests.pretrained.directories import recipe, write


def model(job):
    tree = chunk({tensor.name: Weight(tensor.shape) for tensor in Tensors(job.architecture)})
    with torch.no_grad():
        for parameter in tree.parameters():
            parameter.fill_(1)
    return tree


def test_a_full_disk_is_one_message_and_leaves_what_was_there(tmp_path, alone, messages, monkeypatch):
    monkeypatch.setattr(files, "find_free_bytes", lambda path: 2**30)
    write(tmp_path / "model")
    job, place = recipe(tmp_path / "model"), tmp_path / "run" / "hf"
    tree = model(job)
    exporting.export(place, job, [tree], groups())
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    assert before.keys() == {"config.json", "model.safetensors", MANIFEST_FILE_NAME}
    with torch.no_grad():
        tree.get_parameter("decoder.final_layernorm.weight").fill_(2)
    for room in (1, 2**12, 2**16, len(before["model.safetensors"]) - 1):  # in header, tensors, at the end
        with full_disk(room), pytest.raises(JobFailed, match=r"model\.safetensors") as error:
            exporting.export(place, job, [tree], groups())
        messages(error.value)
        assert {path.name: path.read_bytes() for path in place.iterdir()} == before
        assert [path.name for path in place.parent.iterdir()] == ["hf"], "nothing half written stays"


def test_mtp_layers_that_nobody_publishes_are_left_out_and_said(tmp_path, alone, caplog, messages):
    write(tmp_path / "model")
    job = recipe(tmp_path / "model", mtp={"layers": 1})
    exporting.export(tmp_path / "hf", job, [model(job)], groups())
    (warning,) = (line for line in caplog.messages if "MTP" in line)
    messages(warning)
    assert not [name for name in load_file(tmp_path / "hf" / "model.safetensors") if "mtp" in name]


def test_tensors_of_the_source_that_are_not_trained_are_named(tmp_path, alone, caplog, messages):
    write(tmp_path / "model", "glm4_moe")
    job = recipe(tmp_path / "model", mtp={"layers": 0})
    exporting.export(tmp_path / "hf", job, [model(job)], groups())
    theirs, ours = (load_file(tmp_path / name / "model.safetensors").keys() for name in ("model", "hf"))
    lost = theirs - ours
    assert lost and all(name.startswith("model.layers.4.") for name in lost)
    (warning,) = (line for line in caplog.messages if str(tmp_path / "model") in line)
    assert f"{len(lost)} tensors" in warning
    messages(warning)
    caplog.clear()
    exporting.export(
        tmp_path / "all", recipe(tmp_path / "model"), [model(recipe(tmp_path / "model"))], groups()
    )
    assert "tensors" not in caplog.text


def test_a_model_without_published_weights_has_the_copies_of_its_family(tmp_path, alone):
    write(tmp_path / "model", "deepseek_v3")
    (tmp_path / "model" / "model.safetensors").unlink()
    job = recipe(tmp_path / "model", mtp={"layers": 1})
    tree = model(job)
    with torch.no_grad():
        tree.get_parameter("output_layer.weight").fill_(3)
    exporting.export(tmp_path / "hf", job, [tree], groups())
    found = load_file(tmp_path / "hf" / "model.safetensors")
    for copy, original in {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}.items():
        assert torch.equal(found[f"model.layers.4.{copy}.weight"], found[f"{original}.weight"])
    assert not any(name.startswith("model.layers.5.") for name in found)


@pytest.mark.parametrize(
    ("said", "of_config", "ends", "expected"),
    [
        ('{"eos_token_id": 0, "top_k": 20}', None, (5, 3), {"eos_token_id": [0, 3, 5], "top_k": 20}),
        ('{"eos_token_id": [4, 0]}', 9, (4, 6), {"eos_token_id": [4, 0, 6]}),
        ('{"top_k": 20}', 9, (6,), {"eos_token_id": [9, 6], "top_k": 20}),
        (None, 9, (6,), {"eos_token_id": [9, 6]}),
        (None, 9, (9,), None),
        ('{"eos_token_id": 3}', None, (), {"eos_token_id": 3}),
    ],
)
def test_an_export_stops_where_it_was_trained_to(tmp_path, alone, said, of_config, ends, expected):
    write(tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"eos_token_id": of_config}))
    if said is not None:
        (tmp_path / "model/generation_config.json").write_text(said)
    job = recipe(tmp_path / "model")
    exporting.export(tmp_path / "hf", job, [model(job)], groups(), ends)
    found = tmp_path / "hf/generation_config.json"
    assert (json.loads(found.read_text()) if found.exists() else None) == expected
