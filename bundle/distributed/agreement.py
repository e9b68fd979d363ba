"""What ranks are told by rank 0, and whether all are about to do the same, before a process group exists."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from torch.distributed import Store

from bundle.errors import BundleError, EnvironmentUnfit, ExitCode, LaunchUnavailable

_READING_SECONDS = 60  # that rank 0 stays for others, which may still be starting
_SHOWN = 60  # characters of a value in a message: digests are recognised by less


def handed_down(
    store: Store, rank: int, world_size: int, decide: Callable[[], str], timeout: timedelta
) -> str:
    """Returns what rank 0 decided, which alone does; every rank raises the BundleError that it ended in.

    Raises LaunchUnavailable where rank 0 says nothing within `timeout`.
    """
    if rank == 0:
        try:
            said = {"text": decide()}
        except BundleError as error:
            store.set("decision", json.dumps({"refused": str(error), "code": int(error.code)}))
            _wait_for_readers(store, "decision", world_size - 1)
            raise
        store.set("decision", json.dumps(said))
        return said["text"]
    try:
        store.wait(["decision"], timeout)
    except RuntimeError as error:  # torch's DistStoreError: it did not come in time
        raise LaunchUnavailable(f"rank 0 did not decide within {timeout.total_seconds():.0f} s") from error
    answer = json.loads(store.get("decision"))
    store.add("decision/read", 1)
    if "refused" in answer:
        refused = BundleError(answer["refused"])
        refused.code = ExitCode(answer["code"])
        raise refused
    return str(answer["text"])


def agree(
    store: Store,
    rank: int,
    world_size: int,
    fields: Mapping[str, str],
    timeout: timedelta,
    unfit: Sequence[str] = (),
) -> None:
    """Returns when every rank came with the same `fields`: names, each with a digest or a short value.

    Raises EnvironmentUnfit on every rank, naming the fields that differ, or what makes any rank `unfit`, and
    the ranks; or LaunchUnavailable naming the ranks that did not come within `timeout`.
    """
    store.set(f"agreement/{rank}", json.dumps({"fields": dict(fields), "unfit": list(unfit)}))
    missing: list[int] = []
    if rank == 0:
        missing = _missing(store, world_size, timeout)
        if missing:
            verdict = ["missing", f"{spelled(missing)} did not come within {timeout.total_seconds():.0f} s"]
        else:
            said = [json.loads(store.get(f"agreement/{other}")) for other in range(world_size)]
            verdict = ["differ", *disagreements([one["fields"] for one in said])]
            verdict += complaints([one["unfit"] for one in said])
        store.set("agreement/verdict", json.dumps(verdict))
    # Rank 0 may have waited for all of the timeout before it says so.
    store.wait(["agreement/verdict"], timeout * 2)
    kind, *reasons = json.loads(store.get("agreement/verdict"))
    if rank != 0:
        store.add("agreement/verdict/read", 1)
    elif reasons:
        _wait_for_readers(store, "agreement/verdict", world_size - 1 - len(missing))
    if kind == "missing":
        raise LaunchUnavailable(reasons[0])
    if reasons:
        raise EnvironmentUnfit("the ranks are not about to do what was decided, all the same", reasons)


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


def complaints(said: Sequence[Sequence[str]]) -> list[str]:
    """Returns one line per complaint with the ranks that have it; `said[r]` is what rank r has."""
    holders: dict[str, list[int]] = {}
    for rank, lines in enumerate(said):
        for line in lines:
            holders.setdefault(line, []).append(rank)
    return [f"{spelled(ranks)}: {line}" for line, ranks in holders.items()]


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


def _wait_for_readers(store: Store, key: str, others: int) -> None:
    """Returns when the other ranks have read the bad news, or had time to: rank 0 may serve the store."""
    deadline = time.monotonic() + _READING_SECONDS
    while store.add(f"{key}/read", 0) < others and time.monotonic() < deadline:
        time.sleep(0.05)


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
