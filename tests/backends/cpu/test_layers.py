"""The norm, the duplicated linear layer, and the specs that put them in the place of megatron's."""

import dataclasses
import functools

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core import tensor_parallel
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from bundle.backends.cpu.attention import CpuCoreAttention
from bundle.backends.cpu.runtime import adapt_spec
from bundle.backends.local import DuplicatedLinear, LocalNorm
from bundle.errors import UsageError
from bundle.mcore import filter_keywords

pytestmark = pytest.mark.usefixtures("megatron")


def config(kind=TransformerConfig, **fields):
    return kind(
        **{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "qk_layernorm": True, **fields}
    )


def local_spec(settings):
    block = gpt_layer_specs.get_gpt_layer_local_spec
    return block(
        num_experts=settings.num_moe_experts,
        moe_grouped_gemm=settings.moe_grouped_gemm,
        qk_layernorm=True,
        multi_latent_attention=settings.multi_latent_attention,
        **filter_keywords(block, normalization=settings.normalization),
    )


def inside(spec, path="spec"):
    """Every (path, value) of a spec tree; classes and plain values are leaves."""
    if isinstance(spec, functools.partial):
        yield from inside((spec.func, spec.args, spec.keywords), path)
    elif dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        for field in dataclasses.fields(spec):
            yield from inside(getattr(spec, field.name), f"{path}.{field.name}")
    elif isinstance(spec, dict):
        for name, value in spec.items():
            yield from inside(value, f"{path}[{name}]")
    elif isinstance(spec, (list, tuple)):
        for index, value in enumerate(spec):
            yield from inside(value, f"{path}[{index}]")
    else:
        yield path, spec


@pytest.mark.parametrize("kind", [TransformerConfig, MLATransformerConfig])
@pytest.mark.parametrize("experts", [None, 4])
def test_specs_get_the_cpus_classes_and_megatrons_stay_as_they_were(kind, experts):
    spec = local_spec(config(kind, num_moe_experts=experts, normalization="RMSNorm"))
    before = list(inside(spec))
    ours = dict(inside(adapt_spec(spec)))
    assert list(inside(spec)) == before
    assert not {DotProductAttention, WrappedTorchNorm, FusedLayerNorm} & {
        value for value in ours.values() if isinstance(value, type)
    }
    for path, theirs in before:
        now = ours[path]
        if theirs is DotProductAttention:
            assert now is CpuCoreAttention
        elif theirs is WrappedTorchNorm:
            assert now is LocalNorm
        elif path.endswith(("linear_q_down_proj", "linear_kv_down_proj")):
            assert now is DuplicatedLinear
        else:
            assert now == theirs, path
    assert [value for _, value in before].count(DotProductAttention) == 1


def test_specs_without_a_cpu_form_are_refused(messages):
    with pytest.raises(UsageError, match="TEGroupedMLP") as error:
        adapt_spec(
            {"experts": type("TEGroupedMLP", (), {"__module__": "megatron.core.transformer.moe.experts"})}
        )
    assert "moe_grouped_gemm" in str(error.value)
    messages(error.value)
    foreign = type("TENorm", (), {"__module__": "megatron.core.extensions.transformer_engine"})
    with pytest.raises(UsageError, match="Transformer Engine") as error:
        adapt_spec(functools.partial(foreign, eps=1.0))
    messages(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(
    ("kind", "theirs"), [("RMSNorm", torch.nn.RMSNorm), ("LayerNorm", torch.nn.LayerNorm)]
)
def test_norm_is_torchs_with_marked_weights(kind, theirs, parallel, dtype):
    norm = LocalNorm(config(normalization=kind, params_dtype=dtype), 32, eps=1e-3)
    norm.weight.sequence_parallel = parallel
    reference = theirs(32, eps=1e-3, dtype=dtype)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    reference.load_state_dict(norm.state_dict())
    x = torch.randn(5, 2, 32, dtype=dtype)
    assert torch.equal(norm(x), reference(x)) and norm(x).dtype == dtype


def test_norm_weights_say_whether_they_see_a_part_of_the_sequence(messages):
    for tp, parallel in ((1, False), (2, True)):
        settings = config(
            normalization="LayerNorm", tensor_model_parallel_size=tp, sequence_parallel=parallel
        )
        norm = LocalNorm(settings, 32)
        assert [p.sequence_parallel for p in norm.parameters()] == [parallel, parallel]
    with pytest.raises(UsageError, match="LayerNorm") as error:
        LocalNorm(config(layernorm_zero_centered_gamma=True), 32)
    messages(error.value)


def test_duplicated_linear_is_whole_and_drawn_from_the_common_random_state():
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add(tensor_parallel.random.get_data_parallel_rng_tracker_name(), 3)
    start = tracker.get_states()
    settings = config(tensor_model_parallel_size=2, sequence_parallel=True)
    outside = torch.get_rng_state()

    def build():
        return DuplicatedLinear(
            32, 24, config=settings, init_method=torch.nn.init.normal_, bias=False, parallel_mode="duplicated"
        )

    layer = build()
    assert torch.equal(torch.get_rng_state(), outside)
    tracker.set_states(start)
    assert torch.equal(build().weight, layer.weight)
    tracker.reset()
    x = torch.randn(7, 2, 32)
    out, bias = layer(x)
    assert bias is None and torch.equal(out, x @ layer.weight.T)
    assert layer.weight.sequence_parallel and not getattr(layer.weight, "tensor_model_parallel", False)
    with pytest.raises(UsageError, match="no bias"):
        DuplicatedLinear(2, 2, config=settings, init_method=torch.nn.init.normal_, bias=True)
