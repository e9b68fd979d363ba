"""Latent attention: packed heads as before 0.14, its projections, and gradients over tensor ranks.

Over real ranks and kernels `patches verify` proves the same of whole models.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bundle.replacements import mla

THD = {"qkv_format": "thd", "cu_seqlens_q": "q", "cu_seqlens_kv": "kv"}


def pack(**padded: Any) -> SimpleNamespace:
    return SimpleNamespace(**THD, **{"cu_seqlens_q_padded": None, "cu_seqlens_kv_padded": None, **padded})


def heads(seen: list[Any], *shape: int) -> Any:
    """Stands for the original: says what boundaries and what table it sees, and makes heads of `shape`."""
    cut = mla.keep_full_rotary_table(lambda table, *_, **__: table[:1])

    def original(self, hidden, key_value_states, position_ids, packed, *args, **kwargs):
        boundaries = None if packed is None else (packed.cu_seqlens_q, packed.cu_seqlens_kv)
        seen.append((boundaries, len(cut(torch.zeros(7)))))
        return torch.ones(shape), torch.ones(shape), torch.ones(shape)

    return original


@pytest.mark.parametrize("shape", [(5, 1, 3, 4), (5, 3, 4)], ids=["0.12", "0.13"])
def test_packed_heads_have_no_batch_and_lie_where_the_padding_puts_them(shape):
    seen: list[Any] = []
    get = mla.compute_packed_qkv(heads(seen, *shape))
    params = pack(cu_seqlens_q_padded="padded q", cu_seqlens_kv_padded="padded kv")
    assert [x.shape for x in get(None, None, packed_seq_params=params)] == [(5, 3, 4)] * 3
    get(None, None, packed_seq_params=pack())
    assert seen == [(("padded q", "padded kv"), 7), (("q", "kv"), 7)]
    assert params.cu_seqlens_q == "q" and params.cu_seqlens_kv == "kv"  # somebody else's


@pytest.mark.parametrize("params", [None, SimpleNamespace(**(THD | {"qkv_format": "sbhd"}))])
def test_rows_have_the_heads_and_the_part_of_the_table_that_they_had(params):
    seen: list[Any] = []
    get = mla.compute_packed_qkv(heads(seen, 5, 1, 3, 4))
    assert get(None, None, packed_seq_params=params)[0].shape == (5, 1, 3, 4)
    assert seen[0][1] == 1


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("batch", [True, False])
def test_a_sequence_over_two_ranks_finds_the_angles_behind_its_cut_table(batch):
    """Against the rotation of each row by the angles of its position; rank r has chunks r and 3 - r."""
    rope_utils = pytest.importorskip("megatron.core.models.common.embeddings.rope_utils")
    lengths, whole = (8, 12), torch.rand(12, 1, 1, 6)
    boundaries = torch.tensor([0, 8, 20], dtype=torch.int32)
    config = SimpleNamespace(
        apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False, mrope_section=None
    )
    rotate = mla.rotate_packed_with_full_table(rope_utils.apply_rotary_pos_emb)
    for rank in range(2):
        group = SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank)
        places = [p for n in lengths for c in (rank, 3 - rank) for p in range(c * n // 4, (c + 1) * n // 4)]
        t = torch.randn(len(places), 3, 6)
        angles = whole[places, 0]
        turned = torch.cat((-t[..., 3:], t[..., :3]), -1)
        wanted = t * angles.cos() + turned * angles.sin()
        given = t.unsqueeze(1) if batch else t
        # as its caller cuts it: as many rows as this rank has tokens, too few for the second sequence
        out = rotate(given, whole[:10], config, cu_seqlens=boundaries, cp_group=group)
        torch.testing.assert_close(out, wanted.unsqueeze(1) if batch else wanted)


def test_rotation_of_rows_is_left_alone():
    calls = []
    rotate = mla.rotate_packed_with_full_table(lambda *args, **kwargs: calls.append((args, kwargs)))
    t, table = torch.ones(2, 1, 3, 4), torch.ones(9, 1, 1, 4)[:2]
    rotate(t, table, "config", cu_seqlens=None)
    ((args, _),) = calls
    assert args[0] is t and args[1] is table


@dataclass(frozen=True)
class Submodules:
    q_layernorm: Any
    linear_q_proj: Any


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("rank", [None, 16])
def test_only_compressed_queries_have_a_norm(rank):
    def resolve(self, submodules):
        return {"norm": submodules.q_layernorm, "linear_q_proj": "normed projection"}

    attention = SimpleNamespace(config=SimpleNamespace(q_lora_rank=rank))
    found = mla.drop_uncompressed_query_norm(resolve)(attention, Submodules("norm", "plain"))
    if rank is None:
        assert found["norm"].__name__ == "IdentityOp" and found["linear_q_proj"] == "plain"
    else:
        assert found == {"norm": "norm", "linear_q_proj": "normed projection"}


class Projection(torch.nn.Linear):
    """As megatron's linear layers: the product, and a bias to add later."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


def attention(wrapper: Any, *, ranks: int = 2, sp: bool = False, width: int = 5, **config: Any) -> Any:
    """Latent attention of a rank, with 3 compressed channels and 2 rotary ones, as the wrapper makes it."""

    class Attention:
        def __init__(self) -> None:
            defaults = {"kv_lora_rank": 3, "qk_pos_emb_head_dim": 2, "q_lora_rank": 4, "qk_layernorm": True}
            self.config = SimpleNamespace(**(defaults | {"sequence_parallel": sp} | config))
            self.pg_collection = SimpleNamespace(tp=SimpleNamespace(size=lambda: ranks))
            self.linear_kv_down_proj = Projection(6, width, bias=False)
            self.q_layernorm = torch.nn.LayerNorm(4)

    Attention.__init__ = wrapper(Attention.__init__)  # type: ignore[method-assign]
    return Attention()


@pytest.mark.parametrize(
    ("how", "factors"),
    [
        ({}, [1, 1, 1, 2, 2]),
        ({"ranks": 1}, [1] * 5),
        ({"sp": True}, [1] * 5),
        ({"width": 3}, [1] * 3),  # split over the ranks
    ],
    ids=["whole", "one rank", "sequence parallel", "split"],
)
def test_the_rotary_key_alone_is_summed_over_ranks_that_each_have_all_of_it(how, factors, monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, group: x.mul_(group.size()))
    made = attention(mla.sum_rotary_key_gradient, **how)
    x = torch.randn(7, 6)
    slope = torch.randn(7, len(factors))
    (made.linear_kv_down_proj(x)[0] * slope).sum().backward()
    wanted = (slope * torch.tensor(factors)).t() @ x
    torch.testing.assert_close(made.linear_kv_down_proj.weight.grad, wanted)


@pytest.mark.parametrize(
    ("how", "share"),
    [
        ({}, 0.5),
        ({"ranks": 4}, 0.25),
        ({"sp": True}, 1),
        ({"qk_layernorm": False}, 1),
        ({"q_lora_rank": None}, 1),
    ],
)
def test_the_norm_of_compressed_queries_has_a_rank_s_share_of_its_gradient(how, share):
    made = attention(mla.hook_query_norm_gradient_division, **how)
    x = torch.randn(7, 4)
    made.q_layernorm(x).sum().backward()
    whole = torch.nn.functional.layer_norm(x, (4,)).sum(0)
    torch.testing.assert_close(made.q_layernorm.weight.grad, whole * share)
    torch.testing.assert_close(made.q_layernorm.bias.grad, torch.full((4,), 7.0 * share))
