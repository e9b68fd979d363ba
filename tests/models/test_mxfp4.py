"""MXFP4, as gpt-oss is published: the numbers that transformers makes of it, bit by bit."""

import json

import pytest
import torch
from safetensors.torch import save_file

from bundle import pretrained
from bundle.architectures import from_config
from bundle.architectures.tensors import Tensors
from bundle.errors import UsageError
from bundle.models import loading
from bundle.models.conversion import HuggingFaceDirectoryTensors
from bundle.models.finite_check import FiniteCheck
from bundle.models.mapped_files import MappedFiles
from bundle.models.publishing import dequantize_mxfp4
from tests.reference.configs import CONFIGS
from tests.reference.published import published
from tests.reference.weights import drawn

CONFIG = CONFIGS["gpt_oss"] | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
CONFIG |= {"layer_types": ["sliding_attention"], "quantization_config": {"quant_method": "mxfp4"}}


@pytest.fixture
def directory(tmp_path):
    """A model whose experts' matrices are in MXFP4, every byte and many scales among them."""
    generator = torch.Generator().manual_seed(7)
    weights = {name: value.bfloat16() for name, value in published(CONFIG, drawn(CONFIG, 5)).items()}
    for name in [
        name for name in weights if name.endswith("experts.gate_up_proj") or name.endswith("down_proj")
    ]:
        count, columns, rows = weights.pop(name).shape
        blocks = torch.randint(0, 256, (count, rows, columns // 32, 16), generator=generator)
        scales = torch.randint(110, 140, (count, rows, columns // 32), generator=generator)
        weights[f"{name}_blocks"], weights[f"{name}_scales"] = blocks.byte(), scales.byte()
    written(tmp_path, weights)
    return tmp_path


def written(directory, weights):
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: value.contiguous() for name, value in weights.items()}, directory / "model.safetensors")


def theirs(directory):
    """What transformers loads of it."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.Mxfp4Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, quantization_config=config
    )
    return model.state_dict()


def found_in(directory):
    return pretrained.find_model_weights(directory, CONFIG, from_config(CONFIG))


def test_a_directory_in_mxfp4_is_what_transformers_loads(directory):
    found, wanted = HuggingFaceDirectoryTensors(found_in(directory)), theirs(directory)
    stacks = [name for name in found.tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(stacks) == 2
    for name in stacks:
        shape, dtype = found.tensors[name]
        assert (shape, dtype) == (tuple(wanted[name].shape), torch.bfloat16)
        assert torch.equal(found.read(name), wanted[name])


def test_every_expert_gets_its_own_rows(directory):
    found, wanted = found_in(directory), theirs(directory)
    table = {tensor.name: tensor for tensor in Tensors(from_config(CONFIG))}
    check = FiniteCheck(found)
    for number in range(CONFIG["num_local_experts"]):
        at = f"decoder.layers.0.mlp.experts.local_experts.{number}"
        first, second = (
            loading.read_whole_tensor(
                found, table[f"{at}.linear_fc{which}.weight"], torch.bfloat16, MappedFiles(), check
            )
            for which in (1, 2)
        )
        gate_up = wanted["model.layers.0.mlp.experts.gate_up_proj"][number].T
        down = wanted["model.layers.0.mlp.experts.down_proj"][number].T
        assert torch.equal(first, torch.cat((gate_up[0::2], gate_up[1::2])))
        assert torch.equal(second, down)


def test_every_value_and_every_scale():
    """Against the format's own words: sign, two bits of exponent, one of mantissa; a power of two."""
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16)
    for scale in (0, 1, 60, 127, 200, 250):
        seen = dequantize_mxfp4(blocks, torch.full((16,), scale, dtype=torch.uint8)).double()
        halves = [half for byte in range(256) for half in (byte & 15, byte >> 4)]
        assert seen.tolist() == [_value(half) * 2.0 ** (scale - 127) for half in halves]


def _value(half):
    exponent, mantissa = (half >> 1) & 3, half & 1
    magnitude = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -magnitude if half & 8 else magnitude


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (lambda name, value: None if name.endswith("_scales") else value, "_scales is missing"),
        (lambda name, value: value[..., :1] if name.endswith("_scales") else value, "must be"),
        (lambda name, value: value[..., :8] if name.endswith("_blocks") else value, "U8"),
        (lambda name, value: value.char() if name.endswith("_blocks") else value, "U8"),
        (lambda name, value: value[:1] if "gate_up_proj_" in name else value, "the model's is"),
    ],
)
def test_what_is_no_mxfp4_is_named(directory, changed, named):
    from safetensors.torch import load_file

    weights = load_file(directory / "model.safetensors")
    kept = {name: changed(name, value) for name, value in weights.items()}
    written(directory, {name: value for name, value in kept.items() if value is not None})
    with pytest.raises(UsageError) as refused:
        found_in(directory)
    assert named in str(refused.value)
