"""Context parallel core attention on two real ranks, case by case; prints {case: what was wrong} as JSON."""

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist

from bundle.backends.cpu import facade
from tests import world
from tests.backends.cpu import reference
from tests.ranks import finish_rank, try_cases

CP = 2
PACKS = {
    "packed": ([12, 24, 8], [12, 24, 8], {}),
    "packed-mla-gqa": ([12, 24, 8], [12, 24, 8], {"groups": 2, "qk": 24, "v": 16}),
    "packed-padded": ([9, 1, 8, 0], [12, 4, 16, 4], {}),
    "packed-one-rank-all-padding": ([1], [4], {}),
}
MASKS = ("causal", "no_mask", "padding", "padding_causal", "padding-whole", "arbitrary")


def cases() -> dict[str, Callable[[int], None]]:
    """Name -> a function of the rank that raises what is wrong."""
    found: dict[str, Callable[[int], None]] = {
        f"unpacked-{mask}": partial(unpacked, mask=mask) for mask in MASKS
    }
    for name, (lengths, padded, shape) in PACKS.items():
        for kind in ("causal", "padding"):
            found[f"{name}-{kind}"] = partial(packed, lengths=lengths, padded=padded, shape=shape, kind=kind)
    for seed in range(6):
        found[f"packed-random-{seed}"] = partial(random_pack, seed=seed)
    found["packed-bf16"] = partial(packed, shape={"dtype": torch.bfloat16})
    found["groups-of-parallel-state"] = partial(packed, explicit=False)
    found["dynamic-group"] = partial(packed, dynamic=True)
    found["dynamic-alone"] = alone
    found["uneven-is-refused"] = uneven
    return found


def random_pack(rank, *, seed):
    draw = random.Random(seed)
    lengths = [draw.randrange(0, 30) for _ in range(draw.randrange(1, 7))]
    padded = [-(-n // 4) * 4 + 4 * draw.randrange(1, 3) for n in lengths]
    shape = {"groups": draw.choice([1, 2, 4]), "qk": draw.choice([8, 24])}
    packed(rank, lengths=lengths, padded=padded, shape=shape)


def groups():
    return SimpleNamespace(cp=dist.group.WORLD)


def check(rank, rows, out, whole, shards, wholes, tolerance=1e-9):
    """The shard's output is the whole one's rows, and so is each gradient."""
    from tests.backends.cpu.core import close

    weight = torch.randn(whole.shape, dtype=whole.dtype)
    got = torch.autograd.grad(out, shards, weight[rows].to(out.dtype))
    want = torch.autograd.grad(whole, wholes, weight.to(out.dtype).to(whole.dtype))
    close(out, whole[rows], tolerance)
    for name, a, b in zip("qkv", got, want, strict=True):
        close(a, b[rows], tolerance, f"gradient of {name}")


def packed(
    rank, *, lengths=(12, 24, 8), padded=None, shape=None, kind="causal", explicit=True, dynamic=False
):
    from tests.backends.cpu.core import core_attention, inputs, pack

    shape = {"dtype": torch.float64, **(shape or {})}
    wholes = inputs(sum(padded or lengths), None, **shape, seed=7)
    rows = reference.zigzag_rows(padded or lengths, CP, rank)
    shards = [x.detach()[rows].requires_grad_() for x in wholes]
    attention = core_attention(
        kind,
        cp=1 if dynamic else CP,
        softmax_scale=0.3,
        pg_collection=groups() if explicit and not dynamic else None,
    )
    psp = pack(lengths, padded)
    if dynamic:
        psp.local_cp_size, psp.cp_group = CP, dist.group.WORLD
    out = attention(*shards, None, packed_seq_params=psp)
    exact = q, k, v = [x.detach().double().requires_grad_() for x in wholes]
    whole = reference.packed(q, k, v, lengths, padded or lengths, scale=0.3, causal=kind == "causal").flatten(
        1
    )
    check(rank, rows, out, whole, shards, exact, 1e-9 if out.dtype == torch.float64 else 2e-2)


def unpacked(rank, *, mask):
    from tests.backends.cpu.core import core_attention, inputs

    wholes = inputs(20, 3, groups=2, seed=3)
    rows = reference.zigzag_rows([20], CP, rank)
    shards = [x.detach()[rows].requires_grad_() for x in wholes]
    given, hidden = None, torch.zeros(3, 1, 20, 20, dtype=torch.bool)
    if mask.startswith("padding"):
        hidden = (torch.arange(20) >= torch.tensor([20, 11, 2])[:, None])[:, None, None].expand(3, 1, 20, 20)
        given = hidden[:, :, :1] if mask == "padding-whole" else hidden[:, :, :1, rows]
    if mask == "arbitrary":
        hidden = torch.rand(3, 1, 20, 20) < 0.5
        given = hidden[:, :, rows]
    if mask.endswith("causal"):
        hidden = hidden | reference.future(20, 20)
    attention = core_attention(mask.removesuffix("-whole"), cp=CP, pg_collection=groups())
    out = attention(*shards, given)
    q, k, v = wholes
    columns = [reference.one_sequence(q[:, i], k[:, i], v[:, i], 0.25, hidden[i, 0]) for i in range(3)]
    check(rank, rows, out, torch.stack(columns, 1).flatten(2), shards, wholes)


def alone(rank):
    """Dynamic context parallelism gave this batch to each rank by itself."""
    from tests.backends.cpu.core import agree, core_attention, inputs, pack

    lengths = [7, 5] if rank else [3]
    x = inputs(sum(lengths), None)
    out = core_attention("causal", cp=CP, softmax_scale=0.3, pg_collection=groups())(
        *x, None, packed_seq_params=pack(lengths, local_cp_size=1)
    )
    agree(out, reference.packed(*x, lengths, lengths, scale=0.3, causal=True), x)


def uneven(rank):
    import pytest

    from bundle.errors import JobFailed
    from tests.backends.cpu.core import core_attention, inputs, pack

    with pytest.raises(JobFailed, match=r"\[6\] are not multiples of 4"):
        core_attention("causal", cp=CP, pg_collection=groups())(
            *inputs(5, None), None, packed_seq_params=pack([6, 4])
        )


def main() -> None:
    facade.install()
    rank = world.join()
    with facade.megatron_calls():
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(context_parallel_size=CP)
        wrong = try_cases(cases(), rank)
    finish_rank(wrong)


if __name__ == "__main__":
    main()
