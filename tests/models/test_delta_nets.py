"""Gated delta nets: the parts of their tensors, their first weights, and checkpoints without them."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from bundle.architectures import from_config
from bundle.architectures.tensors import Tensors, find_cut
from bundle.errors import UsageError
from bundle.mcore import gated_delta
from bundle.models import conversion
from bundle.models.gpt import initialize
from bundle.models.naming import GloballyNamedTensor, Shard
from bundle.pretrained import PretrainedWeights
from bundle.pretrained.matching import find_model_weights
from tests.planning.jobs import QWEN3_NEXT

NET = from_config(QWEN3_NEXT).delta_net
AT = "decoder.layers.0.self_attention."


def test_ranks_have_the_parts_of_their_own_heads():
    """Queries and keys are 2 heads of 24, values and gates 4 of 32, each with a beta and an alpha."""
    rows = torch.tensor([0] * 48 + [1] * 48 + [2] * 128 + [3] * 128 + [4] * 4 + [5] * 4)
    numbers = torch.stack((rows, torch.arange(len(rows))), 1)
    how = find_cut(f"{AT}in_proj.weight", NET)
    assert how is not None
    parts = [Shard(how.dim, rank, 2, how.blocks).extract(numbers) for rank in range(2)]
    for kind, width in enumerate((24, 24, 64, 64, 2, 2)):
        first, second = (part[part[:, 0] == kind, 1] for part in parts)
        assert len(first) == len(second) == width
        assert torch.equal(torch.cat((first, second)), numbers[rows == kind, 1])
    assert torch.equal(Shard(how.dim, 0, 2, how.blocks).join(parts), numbers)
    assert find_cut(f"{AT}out_norm.weight", NET) is None
    assert find_cut(f"{AT}conv1d.weight", NET) == ("tp", 0, (48, 48, 128))
    assert find_cut(f"{AT}out_proj.weight", NET) == ("tp", 1, (1,))
    assert find_cut(f"{AT}A_log", NET) == find_cut(f"{AT}dt_bias", NET) == ("tp", 0, (1,))


@pytest.mark.usefixtures("megatron")
def test_kernels_of_gpus_are_not_called_on_the_cpu(monkeypatch):
    """Where flash-linear-attention can be imported, too."""
    theirs = pytest.importorskip("megatron.core.ssm.gated_delta_net")
    monkeypatch.setattr(theirs, "HAVE_FLA", True)
    assert gated_delta._choose_fla_or_torch_class.__wrapped__() is not theirs.GatedDeltaNet


def test_the_sum_of_squares_of_a_norm_is_in_float32():
    """Of so many that bfloat16 would stop adding them."""
    x = torch.linspace(0.5, 1.5, 4096).bfloat16()
    wanted = x.double() / (x.double().square().sum() + 1e-6).sqrt()
    seen = gated_delta._normalize_l2(x)
    assert seen.dtype is torch.bfloat16
    assert (seen.double() / wanted - 1).abs().max() <= 2**-8  # half a step


def test_a_config_says_the_nets_that_it_was_made_of():
    assert NET is not None
    made = SimpleNamespace(config=SimpleNamespace(**gated_delta.build_config_fields(NET)))
    assert gated_delta.read_delta_net(made) == NET
    assert (
        gated_delta.with_attention_only(made.config).experimental_attention_variant is None
    )  # 0.19 makes specs of it
    assert gated_delta.read_delta_net(made) == NET


@pytest.mark.usefixtures("megatron")
def test_checkpoints_have_the_norm_before_a_net_with_its_projection():
    """As Transformer Engine's layers have it, which the same checkpoints are for."""
    specs = pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")
    pytest.importorskip("megatron.core.ssm.gated_delta_net")
    layer = gated_delta._with_net(specs.get_gpt_layer_local_spec(qk_layernorm=True))
    keys = layer.submodules.sharded_state_dict_keys_map
    assert keys["input_layernorm."] == "self_attention.in_proj.layer_norm_"


def test_first_weights_leave_what_goes_through_norms_as_it_is():
    names = {
        "decoder.layers.0.input_layernorm.weight": 0.0,
        f"{AT}q_layernorm.weight": 0.0,
        f"{AT}out_norm.weight": 1.0,
        f"{AT}dt_bias": 1.0,
    }
    named = [GloballyNamedTensor(name, torch.full((8,), 7.0), None) for name in names]
    decays = [GloballyNamedTensor(f"{AT}A_log", torch.empty(4), Shard(0, rank, 2)) for rank in range(2)]
    whole = GloballyNamedTensor(f"{AT}A_log", torch.empty(8), None)
    initialize([*named, *decays, whole], seed=3, std=0.02, num_layers=4, centered=True)
    for item, value in zip(named, names.values(), strict=True):
        assert torch.equal(item.parameter, torch.full((8,), value)), item.name
    assert torch.equal(torch.cat([part.parameter for part in decays]), whole.parameter)
    assert 0.01 <= whole.parameter.exp().min() < whole.parameter.exp().max() <= 16


@pytest.mark.parametrize(
    ("beside", "refused"), [("mtp.layers.0.input_layernorm", ""), ("mtx.norm", "mtx.norm")]
)
def test_multi_token_prediction_is_left_out_of_a_directory_that_has_it(tmp_path, beside, refused):
    table = Tensors(from_config(QWEN3_NEXT))
    shapes = dict(shape for tensor in table for shape in tensor.list_published_shapes())
    shapes[f"{beside}.weight"] = (64,)
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    if refused:
        with pytest.raises(UsageError, match=refused):
            find_model_weights(tmp_path, QWEN3_NEXT, table.architecture)
    else:
        assert f"{beside}.weight" in find_model_weights(tmp_path, QWEN3_NEXT, table.architecture).entries


def test_megatrons_own_checkpoints_of_them_are_refused(tmp_path, messages):
    table = Tensors(from_config(QWEN3_NEXT))
    with pytest.raises(UsageError, match="delta nets") as error:
        conversion.to_torch_dist(PretrainedWeights(tmp_path, {}), table, tmp_path / "out")
    messages(error.value)
    assert not (tmp_path / "out").exists()
