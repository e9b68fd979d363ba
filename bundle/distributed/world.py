"""All ranks together: where they meet and agree, the group of all, and how they fail or end together."""

import gc
import json
import os
import secrets
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from bundle import files
from bundle.distributed import rank_snapshot
from bundle.errors import BundleError, EnvironmentUnfit, ExitCode, JobFailed, TargetUnavailable
from bundle.launch import outcomes
from bundle.launch.outcomes import format_ranks
from bundle.launch.rendezvous import LOOPBACK, Rendezvous
from bundle.transfers import HostCopy

# The file with rank 0's port in the folder of a launch on one node.
PORT_FILE = "port"


def open_store(rendezvous: Rendezvous, timeout: timedelta) -> Store:
    """Return the store of this job; torchrun's agent serves it, or else rank 0 does.

    A one-node job's store listens on loopback only: whoever reaches a store can stop the job or worse. Where
    our launcher started the job, rank 0 gets a free port and tells it to the others. torchrun's MASTER_PORT
    was free when torchrun looked, and may be in use by now. Raise TargetUnavailable when the meeting point
    cannot be reached within `timeout`.
    """
    assert rendezvous.is_rank and rendezvous.port is not None, "only a rank meets other ranks"
    served_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_server = rendezvous.rank == 0 and not served_by_agent
    address, port = rendezvous.address, rendezvous.port
    launch_folder = None if served_by_agent or rendezvous.nodes > 1 else outcomes.get_launch_folder()
    listening = None
    try:
        if is_server and address == LOOPBACK:
            listening = _listen_on_loopback(0 if launch_folder else port)
            port = listening.getsockname()[1]
        if launch_folder and is_server:
            files.write_text(launch_folder / PORT_FILE, str(port))
        elif launch_folder:
            port = _wait_for_port(launch_folder / PORT_FILE, timeout)
        store = TCPStore(
            address,
            port,
            rendezvous.world_size,
            is_master=is_server,
            timeout=timeout,
            wait_for_workers=False,
            # The store closes it. Left to itself it would listen on every interface.
            master_listen_fd=listening.detach() if listening else None,
        )
    except (OSError, RuntimeError) as error:
        verb = "serve" if is_server else "reach"
        raise TargetUnavailable(f"rank {rendezvous.rank} cannot {verb} {address}:{port}: {error}") from error
    # A job that torchrun restarts meets in the same store again.
    return PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def choose_world_folder(store: Store, rank: int, logs: Path) -> Path:
    """Return the folder in `logs` for what concerns all ranks of this launch: each launch has its own."""
    if rank == 0:
        store.set("world", secrets.token_hex(4))
    return logs / f"world-{store.get('world').decode()}"


def initialize(rendezvous: Rendezvous, store: Store, collectives: str, timeout: timedelta) -> None:
    """Create the default process group on the selected device; `collectives` is torch.distributed's name.

    The group is not bound to its device: torch would then connect each later group at once. NCCL takes about
    390 MiB of the device for each, also for a group of one rank, and megatron makes 17 groups on one GPU.
    """
    warnings.filterwarnings("ignore", r"barrier\(\): using the device under current context")
    rank_snapshot.enable_flight_recorder()
    dist.init_process_group(
        collectives,
        store=PrefixStore("world", store),
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=timeout,
    )


def get_default_store() -> Store:
    """Return the store of the default process group, which has no time limit of a collective."""
    return dist.distributed_c10d._get_default_store()


def destroy_process_groups() -> None:
    """End all process groups after all ranks have called this; safe when there is none.

    A process that exits with a group alive may abort while its threads end, which looks like a crash.
    """
    if not dist.is_initialized():
        return
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


def _wait_for_port(path: Path, timeout: timedelta) -> int:
    """Return the port that rank 0 wrote down. Raise OSError where there is none within `timeout`."""
    deadline = time.monotonic() + timeout.total_seconds()
    while (port := files.read_text_if_small(path)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 did not write its port to {path}")
        time.sleep(0.05)
    return int(port)


def _listen_on_loopback(port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((LOOPBACK, port))
    listening.listen(socket.SOMAXCONN)
    return listening


T = TypeVar("T")


def run_and_all_gather_results(body: Callable[[], T]) -> list[T]:
    """Return what `body` returned on each rank; if it raised on any, all raise the same error."""
    result, error, code = None, None, ExitCode.JOB_FAILED
    try:
        result = body()
    except BundleError as caught:
        error, code = str(caught), ExitCode(caught.code)
    except OSError as caught:
        error = str(caught)
    except Exception as caught:  # noqa: BLE001  whatever it is, the others must not wait for this rank
        traceback.print_exc()
        error = f"{type(caught).__name__}: {caught}"
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (result, error, int(code)))
    failures = [
        (rank, reason, rank_code)
        for rank, (_, reason, rank_code) in enumerate(everybody)
        if reason is not None
    ]
    if failures:
        rank, reason, rank_code = failures[0]
        failed = JobFailed(
            reason if rank == 0 else f"rank {rank}: {reason}", [f"rank {r}: {w}" for r, w, _ in failures[1:]]
        )
        failed.code = ExitCode(rank_code)
        raise failed
    return [result for result, _, _ in everybody]


def run_on_rank_0(body: Callable[[], T]) -> T:
    """Return on every rank what `body` returned on rank 0, the only one to run it.

    Raise the same errors as `run_and_all_gather_results`.
    """
    answers: list[Any] = run_and_all_gather_results(lambda: body() if dist.get_rank() == 0 else None)
    return cast(T, answers[0])


class StopRequest:
    """Takes SIGTERM and Ctrl-C from now on; the loop checks between steps, where a checkpoint is possible."""

    def __init__(self, device: torch.device) -> None:
        """Install the handlers (main thread only); flags are exchanged on `device`."""
        self.device = device
        self.is_requested = False
        self._exchanged_flag: HostCopy | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._record_signal)
        # The launcher may have been told to stop before this process could take a signal.
        self.is_requested = self.is_requested or outcomes.is_stop_requested()

    def begin_exchange(self) -> None:
        """Exchange what `agree_to_stop` returns next. That call does not wait for later work of the device.

        A collective.
        """
        flag = torch.full((1,), int(self.is_requested), dtype=torch.int32, device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        self._exchanged_flag = HostCopy(flag)

    def agree_to_stop(self) -> bool:
        """Return whether any rank was asked to stop before the exchange: all ranks stop at the same step.

        A collective. It exchanges now unless `begin_exchange` did since the last call.
        """
        if self._exchanged_flag is None:
            self.begin_exchange()
        assert self._exchanged_flag is not None
        is_agreed = bool(self._exchanged_flag.read().item())
        self._exchanged_flag = None
        return is_agreed

    def _record_signal(self, _number: int, _frame: object) -> None:
        self.is_requested = True


_FAILURE_READERS_WAIT_SECONDS = 60  # that rank 0 stays for others, which may still be starting
_MAX_VALUE_CHARACTERS = 60  # characters of a value in a message: digests are recognised by less


def share_decision(
    store: Store, rank: int, world_size: int, decide: Callable[[], str], timeout: timedelta
) -> str:
    """Return the text that rank 0 decided; on other ranks `decide` is not called.

    Every rank raises the BundleError of rank 0. Raise TargetUnavailable where rank 0 does not answer within
    `timeout`.
    """
    if rank == 0:
        try:
            decision = {"text": decide()}
        except BundleError as error:
            store.set("decision", json.dumps({"refused": str(error), "code": int(error.code)}))
            _wait_for_failure_readers(store, "decision", world_size - 1)
            raise
        store.set("decision", json.dumps(decision))
        return decision["text"]
    try:
        store.wait(["decision"], timeout)
    except RuntimeError as error:  # torch's DistStoreError: it did not come in time
        raise TargetUnavailable(
            f"rank 0 did not send the job to this rank within {timeout.total_seconds():.0f} s"
        ) from error
    answer = json.loads(store.get("decision"))
    store.add("decision/read", 1)
    if "refused" in answer:
        refusal = BundleError(answer["refused"])
        refusal.code = ExitCode(answer["code"])
        raise refusal
    return str(answer["text"])


def agree_on_fields(
    store: Store,
    rank: int,
    world_size: int,
    fields: Mapping[str, str],
    timeout: timedelta,
    unfit: Sequence[str] = (),
) -> None:
    """Wait until every rank came with the same `fields`: names, each with a digest or a short value.

    Raise EnvironmentUnfit on every rank, with the fields that differ, or with what makes any rank `unfit`,
    and with the ranks. Raise TargetUnavailable with the ranks that did not come within `timeout`, or where
    this rank has been here before.
    """
    if store.check([f"agreement/{rank}"]):
        raise TargetUnavailable(
            f"rank {rank}: ranks of an earlier start still run on the node that has the rendezvous store."
            " End those ranks first"
        )
    store.set(f"agreement/{rank}", json.dumps({"fields": dict(fields), "unfit": list(unfit)}))
    missing: list[int] = []
    if rank == 0:
        missing = _find_missing_ranks(store, world_size, timeout)
        if missing:
            verdict = [
                "missing",
                f"{format_ranks(missing)} did not connect within {timeout.total_seconds():.0f} s",
            ]
        else:
            answers = [json.loads(store.get(f"agreement/{other}")) for other in range(world_size)]
            verdict = ["differ", *find_disagreements([answer["fields"] for answer in answers])]
            verdict += merge_complaints([answer["unfit"] for answer in answers])
        store.set("agreement/verdict", json.dumps(verdict))
    # Rank 0 may have waited for all of the timeout before it says so.
    store.wait(["agreement/verdict"], timeout * 2)
    kind, *reasons = json.loads(store.get("agreement/verdict"))
    if rank != 0:
        store.add("agreement/verdict/read", 1)
    elif reasons:
        _wait_for_failure_readers(store, "agreement/verdict", world_size - 1 - len(missing))
    if kind == "missing":
        raise TargetUnavailable(reasons[0])
    if reasons:
        raise EnvironmentUnfit("the ranks have different values for the same job", reasons)


def find_disagreements(fields_by_rank: Sequence[Mapping[str, str]]) -> list[str]:
    """Return one line per field on which ranks differ; `fields_by_rank[r]` are the fields of rank r."""
    lines = []
    for name in sorted({name for fields in fields_by_rank for name in fields}):
        holders: dict[str | None, list[int]] = {}
        for rank, fields in enumerate(fields_by_rank):
            holders.setdefault(fields.get(name), []).append(rank)
        if len(holders) > 1:
            parts = [f"{format_ranks(ranks)}: {_shorten(value)}" for value, ranks in holders.items()]
            lines.append(f"{name} ({'; '.join(parts)})")
    return lines


def merge_complaints(lines_by_rank: Sequence[Sequence[str]]) -> list[str]:
    """Return one line per complaint with the ranks that have it; `lines_by_rank[r]` are those of rank r."""
    holders: dict[str, list[int]] = {}
    for rank, lines in enumerate(lines_by_rank):
        for line in lines:
            holders.setdefault(line, []).append(rank)
    return [f"{format_ranks(ranks)}: {line}" for line, ranks in holders.items()]


def _wait_for_failure_readers(store: Store, key: str, readers: int) -> None:
    """Wait until the other ranks have read a failure, at most `_FAILURE_READERS_WAIT_SECONDS`.

    Rank 0 may serve the store, and must not end before they have read it.
    """
    deadline = time.monotonic() + _FAILURE_READERS_WAIT_SECONDS
    while store.add(f"{key}/read", 0) < readers and time.monotonic() < deadline:
        time.sleep(0.05)


def _find_missing_ranks(store: Store, world_size: int, timeout: timedelta) -> list[int]:
    deadline = time.monotonic() + timeout.total_seconds()
    for rank in range(world_size):
        left = max(0.001, deadline - time.monotonic())
        try:
            store.wait([f"agreement/{rank}"], timedelta(seconds=left))
        except RuntimeError:  # torch's DistStoreError: it did not come in time
            return [other for other in range(world_size) if not store.check([f"agreement/{other}"])]
    return []


def _shorten(value: str | None) -> str:
    if value is None:
        return "nothing"
    return value if len(value) <= _MAX_VALUE_CHARACTERS else f"{value[:_MAX_VALUE_CHARACTERS]}..."
