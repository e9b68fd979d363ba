"""What ranks stream is what they export, bit by bit, and fills transformers' model in every layout."""

import json

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

from bundle.architectures import from_config
from bundle.architectures.tensors import Tensors
from tests.rollouts.families import CONFIGS, draw_model, publish
from tests.rollouts.streamed import LAYOUTS

# Of fp32 engines and transformers with a cache; a gated delta net is computed in two ways.
AGREES, OF_NETS = 1e-4, 1e-3


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("streamed")
    for name in CONFIGS:
        if name != "window":
            tensors = publish(draw_model(name), root / name)
            save_file(tensors | draw_mtp_layers(name, tensors), root / name / "model.safetensors")
    return root


def draw_mtp_layers(name, tensors) -> dict[str, torch.Tensor]:
    """What a family publishes of MTP layers, with the copies of other tensors: transformers has no such."""
    table, generator = Tensors(from_config(CONFIGS[name])), torch.Generator().manual_seed(2)
    if not table.architecture.mtp_layers:
        return {}
    shapes = [item for tensor in table.build_mtp_layer(0) for item in tensor.list_published_shapes()]
    drawn = {key: torch.randn(shape, generator=generator) * 0.3 for key, shape in shapes}
    return drawn | {copy: tensors[original].clone() for copy, original in table.map_copies().items()}


@pytest.mark.world
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stream_is_the_export_and_the_twin_computes_as_the_engine_does(directory, installed, ranks):
    layouts = [name for name in LAYOUTS if (name == "one process") == (ranks == 1)]
    output = installed.world.run("tests.rollouts.streamed", ranks, str(directory), *layouts, timeout=300)
    distances = json.loads(output[0].splitlines()[-1])
    assert len(distances) == sum(len(LAYOUTS[layout][1]) for layout in layouts)
    for case, distance in distances.items():
        assert distance <= (OF_NETS if "linear" in case else AGREES), case
        assert distance > 0 or "cp2" in case
