"""What keeps an export from being written is said once, and what was there before stays."""

import pytest
import torch
from safetensors.torch import load_file

from bundle.architectures.tensors import Tensors
from bundle.errors import JobFailed
from bundle.models import exporting
from bundle.pretrained.replacing import LIST
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


def test_a_full_disk_is_one_message_and_leaves_what_was_there(tmp_path, alone):
    write(tmp_path / "model")
    job, place = recipe(tmp_path / "model"), tmp_path / "run" / "hf"
    tree = model(job)
    exporting.export(place, job, [tree], groups())
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    assert before.keys() == {"config.json", "model.safetensors", LIST}
    with torch.no_grad():
        tree.get_parameter("decoder.final_layernorm.weight").fill_(2)
    for room in (1, 2**12, 2**16, len(before["model.safetensors"]) - 1):  # in header, tensors, at the end
        with full_disk(room), pytest.raises(JobFailed, match=r"model\.safetensors: no room left to write"):
            exporting.export(place, job, [tree], groups())
        assert {path.name: path.read_bytes() for path in place.iterdir()} == before
        assert [path.name for path in place.parent.iterdir()] == ["hf"], "nothing half written stays"


def test_mtp_layers_that_nobody_publishes_are_left_out_and_said(tmp_path, alone, caplog):
    write(tmp_path / "model")
    job = recipe(tmp_path / "model", mtp={"layers": 1})
    exporting.export(tmp_path / "hf", job, [model(job)], groups())
    assert "leaves out the MTP layers: a model_type qwen2 is published without any" in caplog.text
    assert not [name for name in load_file(tmp_path / "hf" / "model.safetensors") if "mtp" in name]
