"""Collectives of two ranks in each type that the engine gives them; every number must be exact."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from bundle.errors import JobFailed
from bundle.verification.collective_types import MOVED_TYPES, REDUCED_TYPES
from bundle.verification.numbers import Bench


def require_exact_collective_results(bench: Bench) -> float:
    """Return 0.0 where every call gave the expected numbers; raise JobFailed with each call that did not."""
    rank, device, wrong, calls = dist.get_rank(), bench.device, [], 0
    for calls_by_name, names in ((REDUCING_CALLS, REDUCED_TYPES), (MOVING_CALLS, MOVED_TYPES)):
        for name in names:
            dtype = getattr(torch, name)
            for call_name, call in calls_by_name.items():
                calls += 1
                try:
                    seen, expected = call(rank, dtype, device)
                    if seen.tolist() != expected:
                        wrong.append(f"{call_name} of {name}: {seen.tolist()} instead of {expected}")
                except RuntimeError as error:
                    wrong.append(f"{call_name} of {name}: {' '.join(str(error).split())[:200]}")
    gathered: list[object] = [None, None]
    dist.all_gather_object(gathered, {"rank": rank})
    if gathered != [{"rank": 0}, {"rank": 1}]:
        wrong.append(f"all_gather_object: {gathered}")
    dist.barrier()
    if wrong:
        raise JobFailed(f"{bench.runtime.collectives}: {len(wrong)} of {calls} calls", wrong)
    return 0.0


ActualAndExpected = tuple[Tensor, list[object]]  # the numbers of a call, and the expected ones


def _all_reduce(rank: int, kind: torch.dtype, device: torch.device) -> ActualAndExpected:
    x = torch.tensor([rank + 1, 3], device=device).to(kind)
    dist.all_reduce(x)
    return x, [3, 6]


def _reduce_maximum(rank: int, kind: torch.dtype, device: torch.device) -> ActualAndExpected:
    x = torch.tensor([rank + 1, 3 - rank], device=device).to(kind)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x, [2, 3]


def _reduce_scatter(rank: int, kind: torch.dtype, device: torch.device) -> ActualAndExpected:
    part, full = torch.empty(2, dtype=kind, device=device), torch.arange(4, device=device).to(kind)
    dist.reduce_scatter_tensor(part, full)
    return part, [4 * rank, 4 * rank + 2]


def _all_gather(rank: int, kind: torch.dtype, device: torch.device) -> ActualAndExpected:
    full, part = torch.empty(4, dtype=kind, device=device), torch.tensor([rank, 1], device=device).to(kind)
    dist.all_gather_into_tensor(full, part)
    return full, [0, 1, 1, 1]


def _all_to_all(rank: int, kind: torch.dtype, device: torch.device) -> ActualAndExpected:
    outputs, inputs = (
        torch.empty(3, dtype=kind, device=device),
        torch.tensor([rank] * 3, device=device).to(kind),
    )
    sent, received = ([2, 1], [2, 1]) if rank == 0 else ([1, 2], [1, 2])
    dist.all_to_all_single(outputs, inputs, received, sent)
    return outputs, [0, 0, 1] if rank == 0 else [0, 1, 1]


def _broadcast(rank: int, kind: torch.dtype, device: torch.device) -> ActualAndExpected:
    x = torch.tensor([1 - rank, 1], device=device).to(kind)
    dist.broadcast(x, 0)
    return x, [1, 1]


def _send_and_receive(rank: int, kind: torch.dtype, device: torch.device) -> ActualAndExpected:
    mine, other = torch.tensor([rank, 1], device=device).to(kind), torch.empty(2, dtype=kind, device=device)
    sides = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]
    for work in dist.batch_isend_irecv(sides):
        work.wait()
    return other, [1 - rank, 1]


_Call = Callable[[int, torch.dtype, torch.device], ActualAndExpected]
REDUCING_CALLS: Mapping[str, _Call] = {
    "all_reduce": _all_reduce,
    "all_reduce of the largest": _reduce_maximum,
    "reduce_scatter": _reduce_scatter,
}
MOVING_CALLS: Mapping[str, _Call] = {
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send and receive": _send_and_receive,
}
