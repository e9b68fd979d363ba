"""The nodes of a job as actors of Ray, each on a machine of its own, where it starts that node's ranks.

They belong to this process, the driver: where that or Ray's head dies, they die. The same command, or the
same job once more, goes on from the last checkpoint in the run directory.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from threading import Event, Thread
from typing import Any

from bundle.errors import ExitCode, LaunchUnavailable
from bundle.launch import job as job_file
from bundle.launch.causes import Action, Kind
from bundle.launch.job import Job
from bundle.launch.orphans import death_signal
from bundle.launch.process import Ended
from bundle.launch.restarts import repeated
from bundle.launch.starters import unstarted
from bundle.launch.verdict import Verdict
from bundle.targets.ray import STOP, Options, bundles, imported, why

_LOOK_SECONDS, _WAIT_SECONDS = 0.5, 2


class Node:
    """A machine of a job, of which Ray has given us the devices of the plan."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def meeting(self) -> str:
        """Where the nodes may meet, if this is the first: HOST:PORT."""
        ray = imported()
        with closing(socket.create_server(("", 0))) as free:
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def run(self, words: tuple[str, ...], workdir: str) -> Generator[str | int, object, None]:
        """Executes one node; gives the lines that it writes, and its exit code at the end."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bundle", *words],
            cwd=workdir,
            # Whoever started Ray's machines has numbered them, and the job's nodes are numbered otherwise.
            env=unstarted(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=death_signal(signal.SIGTERM),
        )
        assert self._process.stdout is not None, "it is a pipe"
        for line in self._process.stdout:  # noqa: UP028 (Ray sends it what it counted, a file takes nothing)
            yield line
        code = self._process.wait()
        yield 128 - code if code < 0 else code

    def stop(self) -> None:
        """Has the node save and end."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()


class Run:
    """One start of all nodes: what each came to, and who asks them to stop."""

    def __init__(self, job: Job, file: Path, options: Options, stopped: Callable[[], bool]) -> None:
        self._job, self._file, self._options, self._stopped = job, file, options, stopped
        self.codes: dict[int, int] = {}
        self.lost: dict[int, str] = {}

    def go(self) -> None:
        """Returns when all nodes have ended. Raises LaunchUnavailable where machines are not free in time,
        and Ended where the job is told to stop before they are.
        """
        ray = imported()
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group(bundles(self._job), strategy="STRICT_SPREAD")
        try:
            deadline = time.monotonic() + self._options.wait
            while not group.wait(_WAIT_SECONDS):
                if self._stopped():
                    raise Ended(_stopped(self._job))
                if time.monotonic() > deadline:
                    raise LaunchUnavailable(self._not_free(ray))
            actor = ray.remote(Node)
            nodes = [
                actor.options(
                    num_cpus=each["CPU"],
                    num_gpus=each.get("GPU", 0.0),
                    resources={name: count for name, count in each.items() if name not in ("CPU", "GPU")},
                    max_concurrency=2,  # one that runs, one that is told to stop
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        placement_group=group, placement_group_bundle_index=rank
                    ),
                ).remote()
                for rank, each in enumerate(bundles(self._job))
            ]
            try:
                where = ray.get(nodes[0].meeting.remote())
            except ray.exceptions.RayError as error:
                self.lost[0] = why(error)
                return
            threads = [
                Thread(target=self._follow, args=(rank, node, where), daemon=True)
                for rank, node in enumerate(nodes)
            ]
            for thread in threads:
                thread.start()
            told = False
            while any(thread.is_alive() for thread in threads):
                if self._stopped() and not told:
                    told = True
                    for node in nodes:
                        node.stop.remote()
                time.sleep(_LOOK_SECONDS)
        finally:
            remove_placement_group(group)

    def _follow(self, rank: int, node: Any, where: str) -> None:
        ray = imported()
        asked = self._options
        words = job_file.words(self._job, self._file, rank, where, asked.restarts, preflight=asked.preflight)
        try:
            for said in node.run.options(num_returns="streaming").remote(words, str(Path.cwd())):
                line = ray.get(said)
                if isinstance(line, int):
                    self.codes[rank] = line
                else:
                    print(line, end="", flush=True)
        except ray.exceptions.RayError as error:
            self.lost[rank] = why(error)

    def _not_free(self, ray: Any) -> str:
        each = ", ".join(f"{count:g} {name}" for name, count in bundles(self._job)[0].items())
        there = "; ".join(
            ", ".join(f"{node['Resources'].get(name, 0):g} {name}" for name in bundles(self._job)[0])
            for node in ray.nodes()
            if node["Alive"]
        )
        return (
            f"{self._job.nodes} machines with {each} each were not free within {self._options.wait} s;"
            f" the cluster has {there}"
        )


def run(job: Job, file: Path, options: Options, kept: Callable[[], object]) -> int:
    """Runs a job on the Ray cluster that this machine is of; the exit code that its nodes come to.

    A machine that is lost is replaced, where Ray has another, as often as `options.restarts` says without a
    new checkpoint, which `kept` names. Raises LaunchUnavailable where there is no cluster, and Ended.
    """
    ray = imported()
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        raise LaunchUnavailable(f"no cluster of Ray that takes us: {why(error)}") from error
    asked = Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    request = file.parent / STOP
    codes: list[int] = []

    def start() -> None:
        made = Run(job, file, options, lambda: asked.is_set() or request.exists())
        made.go()
        codes[:] = made.codes.values()
        if made.lost:
            raise Ended(_lost(job, made.lost))

    repeated(start, options.restarts, kept)
    return max(codes)


def _stopped(job: Job) -> Verdict:
    cause = "told to stop before its machines were free"
    return Verdict(ExitCode.TERMINATED, Kind.STOPPED, cause, Action.RESTART, nodes=job.nodes)


def _lost(job: Job, lost: dict[int, str]) -> Verdict:
    rank = min(lost)
    named = ", ".join(f"node {each} ({said})" for each, said in sorted(lost.items()))
    return Verdict(
        ExitCode.JOB_FAILED,
        Kind.LOST_NODE,
        f"lost by Ray, and all that ran there: {named}",
        Action.RESTART,
        node_rank=rank,
        nodes=job.nodes,
    )
