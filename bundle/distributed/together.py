"""What all ranks do, fail to do or end together: none goes on, or waits, when another one does not."""

import signal
import traceback
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from bundle.errors import BundleError, ExitCode, JobFailed
from bundle.launch import outcomes

T = TypeVar("T")


def on_all_ranks(body: Callable[[], T]) -> list[T]:
    """What `body` returned on each rank; if it raised on any, all raise the same."""
    result, error, code = None, None, ExitCode.JOB_FAILED
    try:
        result = body()
    except BundleError as raised:
        error, code = str(raised), ExitCode(raised.code)
    except OSError as raised:
        error = str(raised)
    except Exception as raised:  # noqa: BLE001  whatever it is, the others must not wait for this rank
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (result, error, int(code)))
    failures = [(rank, why, its) for rank, (_, why, its) in enumerate(everybody) if why is not None]
    if failures:
        rank, why, its = failures[0]
        failed = JobFailed(
            why if rank == 0 else f"rank {rank}: {why}", [f"rank {r}: {w}" for r, w, _ in failures[1:]]
        )
        failed.code = ExitCode(its)
        raise failed
    return [result for result, _, _ in everybody]


def on_rank_0(body: Callable[[], T]) -> T:
    """On every rank what `body` returned on rank 0, which alone runs it; raises like `on_all_ranks`."""
    answers: list[Any] = on_all_ranks(lambda: body() if dist.get_rank() == 0 else None)
    return cast(T, answers[0])


class StopRequest:
    """Takes SIGTERM and Ctrl-C from now on; the loop asks between steps, where a checkpoint is possible."""

    def __init__(self, device: torch.device) -> None:
        """Installs the handlers (main thread only); flags are exchanged on `device`."""
        self.device = device
        self.heard = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hear)
        # The launcher may have been told to stop before this process could take a signal.
        self.heard = self.heard or outcomes.asked_to_stop()

    def agreed(self) -> bool:
        """Returns whether any rank was asked to stop; a collective: all ranks stop at the same step."""
        flag = torch.tensor([int(self.heard)], dtype=torch.int32, device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def _hear(self, _number: int, _frame: object) -> None:
        self.heard = True
