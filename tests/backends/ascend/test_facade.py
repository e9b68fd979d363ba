"""What is replaced for NPUs, without one: the names are there, and are nobody's on other backends."""

import functools
import importlib
import sys
from types import ModuleType

import pytest
import torch

from bundle.backends import ascend
from bundle.backends.ascend.facade import _REPLACEMENT_BUILDERS as REPLACEMENTS
from bundle.capabilities.ascend import REPLACEMENT_REASON_BY_TORCH_NAME
from bundle.errors import EnvironmentUnfit

GATE = "megatron.core.fusions.fused_bias_swiglu:swiglu"


def found(target):
    module, _, attribute = target.partition(":")
    owner = importlib.import_module(module)
    if attribute.startswith("fused_"):  # Transformer Engine's: without it some releases have no such name
        return getattr(owner, attribute, None)
    return functools.reduce(getattr, attribute.split("."), owner)


@pytest.mark.parametrize("adaptor", ["mindspeed.megatron_adaptor", "megatron_adaptor"])
def test_what_an_adaptor_has_replaced_has_no_second_owner(monkeypatch, adaptor, messages):
    monkeypatch.setitem(sys.modules, adaptor, ModuleType(adaptor))
    with pytest.raises(EnvironmentUnfit, match=adaptor) as error:
        ascend.set_up_runtime()
    messages(error.value)


@pytest.mark.usefixtures("megatron")
def test_everything_that_is_named_is_there_and_not_replaced_on_the_cpu():
    from bundle.backends.cpu import runtime

    assert runtime and set(REPLACEMENTS) == set(REPLACEMENT_REASON_BY_TORCH_NAME)
    for target in REPLACEMENT_REASON_BY_TORCH_NAME:
        code = getattr(found(target), "__code__", None)
        assert "backends/ascend" not in getattr(code, "co_filename", ""), target


def test_types_have_cudas_names_both_ways():
    asked = []

    def original(self, dtype=None):
        asked.append(dtype)
        return "torch.npu.FloatTensor" if dtype is None else self

    named = REPLACEMENTS["torch:Tensor.type"](original)
    x = torch.ones(1)
    assert named(x) == "torch.cuda.FloatTensor" and named(x, "torch.cuda.HalfTensor") is x
    assert named(x, torch.float16) is x and asked == [None, "torch.npu.HalfTensor", torch.float16]


def test_the_gate_of_an_idle_expert_is_torchs_since_the_operator_takes_nothing_empty(messages):
    gate = REPLACEMENTS[GATE](lambda y: y[:, :2])
    back = REPLACEMENTS[f"{GATE}_back"](lambda g, y: y)
    nothing = torch.empty(0, 4)
    assert gate(nothing).shape == (0, 2) and back(nothing[:, :2], nothing) is nothing
    for call in (lambda: gate(torch.ones(1, 4)), lambda: back(torch.ones(1, 2), torch.ones(1, 4))):
        with pytest.raises(EnvironmentUnfit, match="npu_swiglu") as error:
            call()
        messages(error.value)
