"""Ascend's core attention over two real ranks, with the emulated operator; prints {case: what was wrong}."""

import random
from collections.abc import Callable
from functools import partial

import torch

from bundle.backends.cpu import facade
from tests import world
from tests.backends.ascend.contract import registered
from tests.backends.cpu import reference
from tests.backends.cpu.context_parallel import CP, check, groups
from tests.ranks import finish_rank, try_cases

LATENT = {"heads": 2, "groups": 2, "qk": 24, "v": 16}


def cases() -> dict[str, Callable[[int], None]]:
    """Name -> a function of the rank that raises what is wrong."""
    found: dict[str, Callable[[int], None]] = {
        "packed": packed,
        "packed latent heads": partial(packed, shape=LATENT),
        "padding between sequences, and one of nothing": partial(
            packed, lengths=(9, 1, 8, 0, 0), padded=(12, 4, 16, 4, 0), shape={"groups": 2}
        ),
        "packed without a mask": partial(packed, kind="padding"),
        "rows": rows,
        "rows without a mask": partial(rows, kind="no_mask"),
        "rows of latent heads": partial(rows, shape=LATENT),
        "a mask is refused": refused,
        "uneven sequences are refused": uneven,
    }
    return found | {f"random packs {seed}": partial(drawn, seed=seed) for seed in range(4)}


def drawn(rank, *, seed):
    draw = random.Random(seed)
    lengths = [draw.randrange(0, 30) for _ in range(draw.randrange(1, 7))]
    padded = [-(-n // 4) * 4 + 4 * draw.randrange(1, 3) for n in lengths]
    packed(rank, lengths=lengths, padded=padded, shape={"groups": draw.choice([1, 2, 4])})


def packed(rank, *, lengths=(12, 24, 8), padded=None, shape=None, kind="causal"):
    from tests.backends.ascend.core import core_attention
    from tests.backends.cpu.core import inputs, pack

    sizes = padded or lengths  # a row of padding sees its own sequence, as any other: it is behind it
    wholes = inputs(sum(sizes), None, dtype=torch.float32, **(shape or {}), seed=7)
    mine = reference.zigzag_rows(sizes, CP, rank)
    shards = [x.detach()[mine].requires_grad_() for x in wholes]
    attention = core_attention(kind, context_parallel_size=CP, softmax_scale=0.3)
    attention.groups = groups()
    out = attention(*shards, None, packed_seq_params=pack(list(lengths), list(sizes)))
    exact = q, k, v = [x.detach().double().requires_grad_() for x in wholes]
    whole = reference.packed(q, k, v, sizes, sizes, scale=0.3, causal=kind == "causal").flatten(1)
    check(rank, mine, out, whole, shards, exact, 2e-5)


def rows(rank, *, kind="causal", shape=None):
    from tests.backends.ascend.core import core_attention
    from tests.backends.cpu.core import inputs

    wholes = inputs(20, 3, dtype=torch.float32, **(shape or {"groups": 2}), seed=3)
    mine = reference.zigzag_rows([20], CP, rank)
    shards = [x.detach()[mine].requires_grad_() for x in wholes]
    attention = core_attention(kind, context_parallel_size=CP, softmax_scale=0.3)
    attention.groups = groups()
    exact = q, k, v = [x.detach().double().requires_grad_() for x in wholes]
    hidden = reference.future(20, 20) if kind == "causal" else torch.zeros(20, 20, dtype=torch.bool)
    columns = [reference.one_sequence(q[:, i], k[:, i], v[:, i], 0.3, hidden) for i in range(3)]
    check(rank, mine, attention(*shards), torch.stack(columns, 1).flatten(2), shards, exact, 2e-5)


def refused(rank):
    import pytest

    from bundle.errors import JobFailed
    from tests.backends.ascend.core import core_attention
    from tests.backends.cpu.core import inputs

    attention = core_attention(context_parallel_size=CP)
    attention.groups = groups()
    with pytest.raises(JobFailed, match=r"a mask bool \[1, 1, 8, 16\]: .*boundaries"):
        attention(*inputs(8, 1, dtype=torch.float32), torch.zeros(1, 1, 8, 16, dtype=torch.bool))


def uneven(rank):
    import pytest

    from bundle.errors import JobFailed
    from tests.backends.ascend.core import core_attention
    from tests.backends.cpu.core import inputs, pack

    attention = core_attention(context_parallel_size=CP)
    attention.groups = groups()
    with pytest.raises(JobFailed, match="padded sequences of 6 rows are not multiples of 4"):
        attention(*inputs(5, None, dtype=torch.float32), None, packed_seq_params=pack([6, 4]))


def main() -> None:
    facade.install()
    registered()
    rank = world.join()
    with facade.megatron_calls():
        wrong = try_cases(cases(), rank)
    finish_rank(wrong)


if __name__ == "__main__":
    main()
