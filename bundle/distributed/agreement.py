"""Whether all ranks are about to do the same thing, asked before a process group exists."""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch.distributed import Store

from bundle.errors import EnvironmentUnfit, LaunchUnavailable

_SHOWN = 60  # characters of a value in a message: digests are recognised by less


def agree(store: Store, rank: int, world_size: int, fields: Mapping[str, str], timeout: timedelta) -> None:
    """Returns when every rank came with the same `fields`: names, each with a digest or a short value.

    Raises EnvironmentUnfit on every rank, naming the fields that differ and the ranks, or LaunchUnavailable
    naming the ranks that did not come within `timeout`.
    """
    store.set(f"agreement/{rank}", json.dumps(dict(fields)))
    if rank == 0:
        missing = _missing(store, world_size, timeout)
        if missing:
            verdict = ["missing", f"{spelled(missing)} did not come within {timeout.total_seconds():.0f} s"]
        else:
            said = [json.loads(store.get(f"agreement/{other}")) for other in range(world_size)]
            verdict = ["differ", *disagreements(said)]
        store.set("agreement/verdict", json.dumps(verdict))
    # Rank 0 may have waited for all of the timeout before it says so.
    store.wait(["agreement/verdict"], timeout * 2)
    kind, *reasons = json.loads(store.get("agreement/verdict"))
    if kind == "missing":
        raise LaunchUnavailable(reasons[0])
    if reasons:
        raise EnvironmentUnfit("the ranks are not about to do the same thing", reasons)


def disagreements(said: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns one line per field on which ranks differ; `said[r]` is what rank r came with."""
    found = []
    for name in sorted({name for fields in said for name in fields}):
        holders: dict[str | None, list[int]] = {}
        for rank, fields in enumerate(said):
            holders.setdefault(fields.get(name), []).append(rank)
        if len(holders) > 1:
            parts = [f"{spelled(ranks)}: {_short(value)}" for value, ranks in holders.items()]
            found.append(f"{name} ({'; '.join(parts)})")
    return found


def spelled(ranks: Sequence[int]) -> str:
    """Returns the ranks as a person would list them: "rank 3", "ranks 0-3, 8"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    listed = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def _missing(store: Store, world_size: int, timeout: timedelta) -> list[int]:
    deadline = time.monotonic() + timeout.total_seconds()
    for rank in range(world_size):
        left = max(0.001, deadline - time.monotonic())
        try:
            store.wait([f"agreement/{rank}"], timedelta(seconds=left))
        except RuntimeError:  # torch's DistStoreError: it did not come in time
            return [other for other in range(world_size) if not store.check([f"agreement/{other}"])]
    return []


def _short(value: str | None) -> str:
    if value is None:
        return "nothing"
    return value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
