"""What megatron cannot do on a cpu by itself."""

import torch

from bundle.mcore.groups import Groups
from bundle.verification.numbers import (
    DENSE,
    EXPERTS,
    Batch,
    Bench,
    Numbers,
    chunk,
    gap,
    gradient_norm,
    rows,
    texts,
    trained,
)


def experts_over_ranks(bench: Bench) -> float:
    """Experts on two ranks, each with all the tokens, against all experts on one."""
    with bench.layout() as groups:
        reference = trained(chunk(bench, groups, EXPERTS), groups, [_batch(bench, groups)])
    with bench.layout(ep=2) as groups:
        seen = trained(chunk(bench, groups, EXPERTS), groups, [_batch(bench, groups)])
    # A rank has half of the experts, and they see the same tokens twice: its own and the other's.
    mine = {name: x / 2 if ".experts." in name else x for name, x in seen.items()}
    return gap(mine, {name: reference[name] for name in mine})


def router_in_fp32(bench: Bench) -> float:
    """A router that is told to compute in fp32 in a model of fp32, against one that is not told."""
    seen: list[Numbers] = []
    with bench.layout() as groups:
        for dtype in (None, "fp32"):
            model = chunk(bench, groups, EXPERTS, {"moe_router_dtype": dtype})
            seen.append(trained(model, groups, [_batch(bench, groups)]))
    return gap(seen[1], seen[0])


def optimizer_step(bench: Bench) -> float:
    """The gradient norm that the optimizer finds, against that of the gradients themselves."""
    with bench.layout() as groups:
        batch = rows(bench, groups, torch.stack(texts((32, 32))), torch.ones(2, 32))
        numbers = trained(chunk(bench, groups, DENSE), groups, [batch])
        squares = sum(x.square().sum() for name, x in numbers.items() if name != "loss")
        reference = torch.as_tensor(squares).sqrt() / batch.mask.sum()
        return gap(gradient_norm(bench, groups, DENSE), {"norm": reference})


def _batch(bench: Bench, groups: Groups) -> Batch:
    return rows(bench, groups, torch.stack(texts((16, 16))), torch.ones(2, 16))
