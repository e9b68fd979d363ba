"""What stands around torch-npu's operators of rotation and experts, over references that check them."""

import json
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("megatron.core")

from bundle.backends.ascend import facade, permutation
from bundle.capabilities.ascend import ASCEND
from bundle.errors import JobFailed
from tests.backends.cpu.smoke import recipe
from tests.npu.emulation import experts as references
from tests.npu.emulation import operators

ROPE = "megatron.core.models.common.embeddings.rope_utils"
TURN = f"{ROPE}:_apply_rotary_pos_emb_bshd"


@pytest.fixture
def emulated(monkeypatch):
    """Operators are found, whose names are noted."""
    called = []
    known = {one.__name__: one for one in (*operators.OPERATORS, *references.OPERATORS)}

    def operator(name):
        called.append(name)
        return known[name]

    monkeypatch.setattr(facade, "find_operator", operator)
    monkeypatch.setattr(permutation, "find_operator", operator)
    yield called, operator
    facade.set_rotary_operator_enabled(False)


@pytest.fixture
def called(emulated):
    return emulated[0]


@pytest.fixture
def experts(emulated, monkeypatch):
    from bundle.backends.ascend import experts

    monkeypatch.setattr(experts, "find_operator", emulated[1])
    return experts


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("how", [{}, {"rotary_interleaved": True}, {"multi_latent_attention": True}])
@pytest.mark.parametrize(("batch", "mscale"), [(1, 1.0), (3, 0.5)])
def test_a_turn_is_megatrons_of_a_part_of_a_head_too(called, how, batch, mscale):
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd as plain

    turn = facade._REPLACEMENT_BUILDERS[TURN](plain)
    torch.manual_seed(1)
    x, half = torch.randn(5, 3, 2, 8), torch.randn(5, 1 if how.get("rotary_interleaved") else batch, 1, 3)
    wanted = plain(x, angles := torch.cat((half, half), -1), mscale=mscale, **how)
    torch.testing.assert_close(turn(x, angles, mscale=mscale, **how), wanted)
    assert not called  # until it is chosen
    facade.set_rotary_operator_enabled(True)
    torch.testing.assert_close(turn(x, angles, mscale=mscale, **how), wanted)
    assert called == ["npu_rotary_mul"]


@pytest.mark.usefixtures("megatron")
def test_what_the_operator_does_not_take_is_turned_by_megatron(called):
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd as plain

    turn = facade._REPLACEMENT_BUILDERS[TURN](plain)
    facade.set_rotary_operator_enabled(True)
    for shape, width in (((5, 1, 2, 896), 896), ((0, 1, 2, 8), 8), ((5, 1, 1, 2, 8), 8)):
        x, angles = torch.randn(shape), torch.randn(shape[0], *(1 for _ in shape[1:-1]), width)
        torch.testing.assert_close(turn(x, angles), plain(x, angles))
    assert not called


@pytest.mark.parametrize(("dtype", "tensors"), [(torch.float32, 1), (torch.bfloat16, 3)])
def test_the_product_of_experts_is_theirs_one_by_one(experts, emulated, dtype, tensors):
    torch.manual_seed(2)
    rows, weights = torch.randn(6, 4).to(dtype), [torch.randn(5, 4).to(dtype) for _ in range(3)]
    sizes, given = (4, 0, 2), []
    grouped = emulated[1]

    def noted(name):
        def call(x, weight, **options):
            given.append((options["group_type"], len(weight)))
            return grouped(name)(x, weight, **options)

        return call

    leaves = [x.requires_grad_() for x in (rows, *weights)]
    plain = torch.cat([part @ w.t() for part, w in zip(rows.split(sizes), weights, strict=True)])
    with patch.object(experts, "find_operator", noted):
        ours = experts.multiply_by_experts(rows, weights, torch.tensor(sizes).cumsum(0))
        weight = torch.randn_like(plain)
        found = torch.autograd.grad(ours, leaves, weight)
    wanted = torch.autograd.grad(plain, leaves, weight)
    for one, other in zip((ours, *found), (plain, *wanted), strict=True):
        torch.testing.assert_close(one, other)
    assert given == [(0, tensors), (0, tensors), (2, 1)]


def test_more_matrices_than_a_list_may_hold_are_one_tensor(experts):
    rows, weights = torch.ones(1, 2, dtype=torch.bfloat16), [torch.ones(2, 2, dtype=torch.bfloat16)] * 129
    assert experts.multiply_by_experts(rows, weights, torch.ones(129, dtype=torch.int64)).tolist() == [[2, 2]]


def test_frozen_experts_have_no_gradient_and_cost_none(experts, called):
    rows, weights = torch.ones(2, 3, requires_grad=True), [torch.ones(4, 3)] * 2
    experts.multiply_by_experts(rows, weights, torch.tensor([1, 2])).sum().backward()
    assert rows.grad is not None and called == ["npu_grouped_matmul"] * 2


@pytest.mark.usefixtures("megatron", "emulated")
def test_tokens_go_and_come_back_as_megatron_sends_them():
    from megatron.core.transformer.moe import moe_utils

    torch.manual_seed(3)
    tokens, probs = torch.randn(5, 4), torch.rand(5, 3)
    routes = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0], [0, 1, 1]]).bool()
    sent, weights, order, *_ = moe_utils.permute(tokens, routes, probs, 10)
    back = moe_utils.unpermute(sent, order, tokens.shape)
    ours, own, places = permutation.fused_permute_with_probs(tokens, probs, routes, num_out_tokens=10)
    torch.testing.assert_close((ours, own), (sent, weights))
    again = permutation.fused_unpermute(ours, places, merging_probs=None, restore_shape=tokens.shape)
    torch.testing.assert_close(again, back)
    sizes, chunks = torch.tensor([4, 0, 6]), torch.tensor([2, 0, 1])
    wanted = moe_utils.sort_chunks_by_idxs(sent, sizes, chunks, weights)
    found = permutation.fused_sort_chunks_by_index_with_probs(ours, own, sizes, chunks)
    torch.testing.assert_close(found, tuple(wanted))
    torch.testing.assert_close(permutation.fused_sort_chunks_by_index(ours, sizes, chunks), wanted[0])


@pytest.mark.parametrize("more", [{"merging_probs": torch.ones(2, 1)}, {"pad_offsets": [0]}])
def test_tokens_that_the_operator_cannot_put_back_are_refused_with_a_way_out(more, messages):
    asked = {"merging_probs": None, "restore_shape": (2, 4)} | more
    with pytest.raises(JobFailed, match=r"model\.operators") as error:
        permutation.fused_unpermute(torch.ones(2, 4), torch.arange(2), **asked)
    messages(error.value)


def test_which_operations_a_job_has():
    def names(job):
        return [one.name for one in ASCEND.list_applicable_operators(job)]

    everywhere = ["rms_norm", "swiglu", "rotary", "adamw"]
    lora = {"lora": {"rank": 2, "alpha": 4, "targets": ["o_proj"]}}
    assert names(recipe("dense")) == everywhere
    assert names(recipe("latent")) == [*everywhere[:3], "permute", "grouped_experts", "adamw"]
    assert names(recipe("latent", model=lora)) == [*everywhere[:3], "permute", "adamw"]
    assert names(recipe("dense", optimizer={"name": "sgd"})) == everywhere[:3]
    assert not ASCEND.uses_operator(recipe("dense"), "permute")
    assert json.dumps(names(recipe("latent", model={"operators": []}))) == json.dumps(names(recipe("latent")))


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(
    "name", ["npu_rotary_mul", "ascend_permutation", "npu_grouped_matmul", "fused_adamw"]
)
def test_an_acceptance_passes_the_references_and_no_other(experts, emulated, name, monkeypatch):
    """What measures an operator on hardware; each is broken once, in what its backward pass gives too."""
    from types import SimpleNamespace

    from bundle.backends.ascend import operators as found
    from bundle.verification.measurements import operators as measured

    monkeypatch.setattr(found, "find_operator", emulated[1])
    bench = SimpleNamespace(device=torch.device("cpu"))
    assert getattr(measured, f"measure_{name}")(bench) <= 1
    if name == "fused_adamw":
        adamw = torch.optim.AdamW
        decay = {True: 0.0, False: 0.1}  # forgotten by the kernel
        monkeypatch.setattr(
            torch.optim,
            "AdamW",
            lambda weights, fused, **options: adamw(weights, **options | {"weight_decay": decay[fused]}),
        )
    elif name == "npu_rotary_mul":
        monkeypatch.setattr(found, "find_operator", lambda _: lambda x, cos, sin, mode: x * cos + x * sin)
    elif name == "ascend_permutation":
        monkeypatch.setattr(permutation, "fused_unpermute", lambda rows, *_, **__: rows[:12])
    else:
        monkeypatch.setattr(experts, "BY_SUMMED", experts.BY_ROWS)
        with pytest.raises(RuntimeError):
            getattr(measured, f"measure_{name}")(bench)
        return
    assert not getattr(measured, f"measure_{name}")(bench) <= 1
