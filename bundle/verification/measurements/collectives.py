"""Collectives of two ranks in each type that the engine hands them: every number counts, none may differ."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from bundle.errors import JobFailed
from bundle.verification.acceptance import MOVED, REDUCED
from bundle.verification.numbers import Bench


def exchanged(bench: Bench) -> float:
    """0.0 where every call gave what it should; raises JobFailed with each that did not."""
    rank, device, wrong, calls = dist.get_rank(), bench.device, [], 0
    for each, names in ((REDUCING, REDUCED), (MOVING, MOVED)):
        for name in names:
            kind = getattr(torch, name)
            for called, call in each.items():
                calls += 1
                try:
                    seen, expected = call(rank, kind, device)
                    if seen.tolist() != expected:
                        wrong.append(f"{called} of {name}: {seen.tolist()} instead of {expected}")
                except RuntimeError as error:
                    wrong.append(f"{called} of {name}: {' '.join(str(error).split())[:200]}")
    said: list[object] = [None, None]
    dist.all_gather_object(said, {"rank": rank})
    if said != [{"rank": 0}, {"rank": 1}]:
        wrong.append(f"all_gather_object: {said}")
    dist.barrier()
    if wrong:
        raise JobFailed(f"{bench.runtime.collectives}: {len(wrong)} of {calls} calls", wrong)
    return 0.0


Seen = tuple[Tensor, list[object]]  # what a call gave, and what it should have


def _all_reduce(rank: int, kind: torch.dtype, device: torch.device) -> Seen:
    x = torch.tensor([rank + 1, 3], device=device).to(kind)
    dist.all_reduce(x)
    return x, [3, 6]


def _maximum(rank: int, kind: torch.dtype, device: torch.device) -> Seen:
    x = torch.tensor([rank + 1, 3 - rank], device=device).to(kind)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x, [2, 3]


def _reduce_scatter(rank: int, kind: torch.dtype, device: torch.device) -> Seen:
    part, whole = torch.empty(2, dtype=kind, device=device), torch.arange(4, device=device).to(kind)
    dist.reduce_scatter_tensor(part, whole)
    return part, [4 * rank, 4 * rank + 2]


def _all_gather(rank: int, kind: torch.dtype, device: torch.device) -> Seen:
    whole, part = torch.empty(4, dtype=kind, device=device), torch.tensor([rank, 1], device=device).to(kind)
    dist.all_gather_into_tensor(whole, part)
    return whole, [0, 1, 1, 1]


def _all_to_all(rank: int, kind: torch.dtype, device: torch.device) -> Seen:
    got, given = torch.empty(3, dtype=kind, device=device), torch.tensor([rank] * 3, device=device).to(kind)
    sent, received = ([2, 1], [2, 1]) if rank == 0 else ([1, 2], [1, 2])
    dist.all_to_all_single(got, given, received, sent)
    return got, [0, 0, 1] if rank == 0 else [0, 1, 1]


def _broadcast(rank: int, kind: torch.dtype, device: torch.device) -> Seen:
    x = torch.tensor([1 - rank, 1], device=device).to(kind)
    dist.broadcast(x, 0)
    return x, [1, 1]


def _exchange(rank: int, kind: torch.dtype, device: torch.device) -> Seen:
    mine, other = torch.tensor([rank, 1], device=device).to(kind), torch.empty(2, dtype=kind, device=device)
    sides = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]
    for work in dist.batch_isend_irecv(sides):
        work.wait()
    return other, [1 - rank, 1]


_Call = Callable[[int, torch.dtype, torch.device], Seen]
REDUCING: Mapping[str, _Call] = {
    "all_reduce": _all_reduce,
    "all_reduce of the largest": _maximum,
    "reduce_scatter": _reduce_scatter,
}
MOVING: Mapping[str, _Call] = {
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send and receive": _exchange,
}
