"""What all ranks do or fail to do together: none goes on, or waits for ever, when another one failed."""

import traceback
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from bundle.errors import BundleError, ExitCode, JobFailed

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
