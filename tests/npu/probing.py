"""The emulation itself, on two ranks: what it computes, and refuses; prints {case: what was wrong}."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests import world
from tests.npu import probing_experts
from tests.ranks import finish_rank, try_cases


def cases() -> dict[str, Callable[[int], None]]:
    """Name -> a function of the rank that raises what is wrong."""
    return {
        "a network trains as on the cpu": network,
        "operands on two devices": partial(refuses, "same device", lambda x: x + torch.ones(2)),
        "an index of the cpu is taken": indexed,
        "norm": norm,
        "gate": gate,
        "a gate of nothing": partial(refuses, "an empty tensor", lambda x: torch.ops.npu.npu_swiglu(x[:0])),
        "a gate of an odd width": partial(
            refuses, "is odd", lambda x: torch.ops.npu.npu_swiglu(x[:1].contiguous())
        ),
        "a gate of every other row": partial(
            refuses, "not contiguous", lambda x: torch.ops.npu.npu_swiglu(x.expand(2, 2).t())
        ),
        "a norm of another width": partial(refuses, "not the end of", _norm(torch.float32, 3)),
        "a norm in a narrower type": partial(refuses, "gamma torch.bfloat16", _norm(torch.bfloat16, 2)),
        "collectives": collectives,
        "float64 is moved": moved,
        "float64 is not reduced": partial(
            refuses, "Unsupported data type", lambda x: dist.all_reduce(x.double())
        ),
        "no bits are reduced": partial(
            refuses, "Unsupported reduction", lambda x: dist.all_reduce(x.int(), dist.ReduceOp.BOR)
        ),
        "nothing of the cpu": partial(
            refuses, "No backend type associated with device type cpu", lambda x: dist.all_reduce(x.cpu())
        ),
        "nothing that is not dense": partial(
            refuses, "NPU and dense", lambda x: dist.all_reduce(torch.ones(2, 2, device=x.device).triu().t())
        ),
        "a gloo group beside it": beside,
        **probing_experts.cases(refuses),
    }


def _norm(dtype: torch.dtype, width: int) -> Callable[[torch.Tensor], Any]:
    return lambda x: torch.ops.npu.npu_rms_norm(x[None], torch.ones(width, dtype=dtype, device=x.device))


def refuses(message: str, call: Callable[[torch.Tensor], Any], rank: int) -> None:
    """The call with a vector of this rank's NPU is refused with a message."""
    try:
        call(torch.ones(2, device=_here(rank)))
    except RuntimeError as error:
        assert message in str(error), error
    else:
        raise AssertionError("it was taken")


def _here(rank: int) -> str:
    return f"npu:{rank}"


def network(rank: int) -> None:
    seen = []
    for device in ("cpu", _here(rank)):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16)).to(
            device
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x = torch.linspace(-1, 1, 32).view(4, 8).to(device)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = (model(x)[:, 3:] ** 3).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        seen.append(losses)
    assert seen[0] == seen[1] and len(set(seen[0])) == 3, seen


def indexed(rank: int) -> None:
    x = torch.arange(4, device=_here(rank))
    assert x[torch.tensor([3, 0])].tolist() == [3, 0]


def norm(rank: int) -> None:
    """Values and gradients by torch-npu's own autograd are those of torch's rms_norm."""
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        torch.manual_seed(5)
        x, gamma, weight = (torch.randn(size).to(dtype) for size in ((3, 4, 8), (8,), (3, 4, 8)))
        found = []
        for device in (_here(rank), "cpu"):
            a, b = (y.to(device).requires_grad_() for y in (x, gamma))
            out = (
                torch.ops.npu.npu_rms_norm(a, b, 1e-3)[0] if device != "cpu" else F.rms_norm(a, (8,), b, 1e-3)
            )
            found.append([y.cpu() for y in (out, *torch.autograd.grad(out, (a, b), weight.to(device)))])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


def gate(rank: int) -> None:
    """Value and gradient by torch-npu's own autograd are those of torch's silu and product."""
    torch.manual_seed(6)
    x, weight = torch.randn(3, 4, 8), torch.randn(3, 4, 4)
    here, there = (y.requires_grad_() for y in (x.to(_here(rank)), x.clone()))
    first, second = there.chunk(2, -1)
    for out, leaf in ((torch.ops.npu.npu_swiglu(here), here), (F.silu(first) * second, there)):
        (gradient,) = torch.autograd.grad(out, leaf, weight.to(leaf.device))
        found = out.detach().cpu(), gradient.cpu()
        if leaf is here:
            ours = found
    for one, other in zip(ours, found, strict=True):
        torch.testing.assert_close(one, other)


def collectives(rank: int) -> None:
    x, other = torch.full((2,), float(rank + 1), device=_here(rank)), 1 - rank
    total = x.clone()
    dist.all_reduce(total)
    assert total.tolist() == [3, 3]
    whole = torch.empty(4, device=x.device)
    dist.all_gather_into_tensor(whole, x)
    assert whole.tolist() == [1, 1, 2, 2]
    part = torch.empty(2, device=x.device)
    dist.reduce_scatter_tensor(part, whole, async_op=True).wait()
    assert part.tolist() == [2 * (rank + 1)] * 2
    swapped = torch.empty(2, device=x.device)
    dist.all_to_all_single(swapped, x)
    assert swapped.tolist() == [1, 2]
    got = torch.empty(2, device=x.device)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, got, other)]
    ):
        work.wait()
    assert got.tolist() == [other + 1] * 2
    said: list[Any] = [None, None]
    dist.all_gather_object(said, {"rank": rank})
    assert said == [{"rank": 0}, {"rank": 1}]
    dist.gather_object({"rank": rank}, said if rank == 0 else None)
    assert said == [{"rank": 0}, {"rank": 1}]


def moved(rank: int) -> None:
    whole = torch.empty(2, dtype=torch.float64, device=_here(rank))
    dist.all_gather_into_tensor(whole, torch.full((1,), 0.1 + rank, dtype=torch.float64, device=_here(rank)))
    assert whole.tolist() == [0.1, 1.1]


def beside(rank: int) -> None:
    """megatron's groups for the host: tensors of the cpu, and no others."""
    group = dist.new_group(backend="gloo")
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    assert x.item() == 2
    refuses("No backend type", lambda y: dist.all_reduce(y, group=group), rank)


def main() -> None:
    rank = world.join()
    torch.npu.set_device(rank)
    finish_rank(try_cases(cases(), rank))


if __name__ == "__main__":
    main()
