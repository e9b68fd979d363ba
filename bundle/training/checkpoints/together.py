"""What all ranks do or fail to do together: none goes on, or waits for ever, when another one failed."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from bundle.errors import BundleError, JobFailed

T = TypeVar("T")


def together(body: Callable[[], T]) -> list[T]:
    """Returns what `body` returned on each rank; raises JobFailed on all ranks if it raised on any."""
    result, error = None, None
    try:
        result = body()
    except (OSError, ValueError, RuntimeError, BundleError) as raised:
        error = str(raised)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (result, error))
    failures = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(everybody) if why is not None]
    if failures:
        raise JobFailed(failures[0].removeprefix("rank 0: "), failures[1:])
    return [result for result, _ in everybody]


def first(body: Callable[[], T]) -> T:
    """Returns on every rank what `body` returned on rank 0, which alone runs it; raises like `together`."""
    answers: list[Any] = together(lambda: body() if dist.get_rank() == 0 else None)
    return cast(T, answers[0])
