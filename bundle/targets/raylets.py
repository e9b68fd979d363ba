"""The nodes of a job as Ray actors, each on its own machine, where it starts that node's ranks.

The actors belong to this process, the driver: they die with the driver or with Ray's head. The same command,
or the same job again, continues from the last checkpoint in the run directory.
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

from bundle.errors import ExitCode, TargetUnavailable
from bundle.launch import job as job_file
from bundle.launch.causes import FailureKind, RestartAction
from bundle.launch.job import Job
from bundle.launch.orphans import prepare_parent_death_signal
from bundle.launch.process import LaunchFailed
from bundle.launch.restarts import run_with_restarts
from bundle.launch.starters import remove_starter_variables
from bundle.launch.verdict import Verdict
from bundle.targets.ray import STOP_NAME, RayOptions, build_placement_bundles, describe_error, import_ray

_POLL_SECONDS, _WAIT_SECONDS = 0.5, 2


class NodeActor:
    """A machine of a job, on which Ray has reserved the devices of the plan."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def choose_rendezvous_endpoint(self) -> str:
        """Return an endpoint HOST:PORT where the nodes may meet, if this node is the first one."""
        ray = import_ray()
        with closing(socket.create_server(("", 0))) as free:
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def run(self, words: tuple[str, ...], workdir: str) -> Generator[str | int, object, None]:
        """Execute one node; yield the lines that it writes, and its exit code at the end."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bundle", *words],
            cwd=workdir,
            # The starter of Ray's machines numbered them, and the job's nodes have other numbers.
            env=remove_starter_variables(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=prepare_parent_death_signal(signal.SIGTERM),
        )
        assert self._process.stdout is not None, "it is a pipe"
        for line in self._process.stdout:  # noqa: UP028 (Ray sends it what it counted, a file takes nothing)
            yield line
        code = self._process.wait()
        yield 128 - code if code < 0 else code

    def stop(self) -> None:
        """Tell the node to save and end."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()


class RayLaunch:
    """One start of all nodes: their exit codes, lost nodes with the reason, and the request to stop."""

    def __init__(self, job: Job, file: Path, options: RayOptions, is_stopped: Callable[[], bool]) -> None:
        self._job, self._file, self._options, self._is_stopped = job, file, options, is_stopped
        self.codes: dict[int, int] = {}
        self.lost: dict[int, str] = {}

    def run_node_actors(self) -> None:
        """Run all nodes until they have ended.

        Raise TargetUnavailable where machines are not free in time. Raise LaunchFailed where the job is told
        to stop before they are free.
        """
        ray = import_ray()
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group(build_placement_bundles(self._job), strategy="STRICT_SPREAD")
        try:
            deadline = time.monotonic() + self._options.wait
            while not group.wait(_WAIT_SECONDS):
                if self._is_stopped():
                    raise LaunchFailed(_build_stop_before_start_verdict(self._job))
                if time.monotonic() > deadline:
                    raise TargetUnavailable(self._describe_shortage(ray))
            actor = ray.remote(NodeActor)
            nodes = [
                actor.options(
                    num_cpus=bundle["CPU"],
                    num_gpus=bundle.get("GPU", 0.0),
                    resources={name: count for name, count in bundle.items() if name not in ("CPU", "GPU")},
                    max_concurrency=2,  # one call that runs, one call of stop
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        placement_group=group, placement_group_bundle_index=rank
                    ),
                ).remote()
                for rank, bundle in enumerate(build_placement_bundles(self._job))
            ]
            try:
                rendezvous = ray.get(nodes[0].choose_rendezvous_endpoint.remote())
            except ray.exceptions.RayError as error:
                self.lost[0] = describe_error(error)
                return
            threads = [
                Thread(target=self._run_node, args=(rank, node, rendezvous), daemon=True)
                for rank, node in enumerate(nodes)
            ]
            for thread in threads:
                thread.start()
            stop_sent = False
            while any(thread.is_alive() for thread in threads):
                if self._is_stopped() and not stop_sent:
                    stop_sent = True
                    for node in nodes:
                        node.stop.remote()
                time.sleep(_POLL_SECONDS)
        finally:
            remove_placement_group(group)

    def _run_node(self, rank: int, node: Any, rendezvous: str) -> None:
        ray = import_ray()
        options = self._options
        words = job_file.build_train_arguments(
            self._job, self._file, rank, rendezvous, options.restarts, preflight=options.preflight
        )
        try:
            for item in node.run.options(num_returns="streaming").remote(words, str(Path.cwd())):
                line = ray.get(item)
                if isinstance(line, int):
                    self.codes[rank] = line
                else:
                    print(line, end="", flush=True)
        except ray.exceptions.RayError as error:
            self.lost[rank] = describe_error(error)

    def _describe_shortage(self, ray: Any) -> str:
        required = ", ".join(
            f"{count:g} {name}" for name, count in build_placement_bundles(self._job)[0].items()
        )
        available = "; ".join(
            ", ".join(
                f"{node['Resources'].get(name, 0):g} {name}" for name in build_placement_bundles(self._job)[0]
            )
            for node in ray.nodes()
            if node["Alive"]
        )
        return (
            f"the machines were not free within {self._options.wait} s: the job needs {self._job.nodes},"
            f" with {required} each; the cluster has {available}"
        )


def run(job: Job, file: Path, options: RayOptions, get_progress: Callable[[], object]) -> int:
    """Run a job on the Ray cluster of this machine and return the largest exit code of its nodes.

    A lost machine is replaced where Ray has another one: at most `options.restarts` times without a new
    checkpoint, which `get_progress` names. Raise TargetUnavailable where there is no cluster, and
    LaunchFailed where the job fails.
    """
    ray = import_ray()
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        raise TargetUnavailable(f"no Ray cluster accepts this program: {describe_error(error)}") from error
    stop_event = Event()
    signal.signal(signal.SIGTERM, lambda *_: stop_event.set())
    stop_file = file.parent / STOP_NAME
    codes: list[int] = []

    def start() -> None:
        launch = RayLaunch(job, file, options, lambda: stop_event.is_set() or stop_file.exists())
        launch.run_node_actors()
        codes[:] = launch.codes.values()
        if launch.lost:
            raise LaunchFailed(_build_lost_verdict(job, launch.lost))

    run_with_restarts(start, options.restarts, get_progress)
    return max(codes)


def _build_stop_before_start_verdict(job: Job) -> Verdict:
    cause = "stopped on request before its machines were free"
    return Verdict(ExitCode.TERMINATED, FailureKind.STOPPED, cause, RestartAction.RESTART, nodes=job.nodes)


def _build_lost_verdict(job: Job, lost: dict[int, str]) -> Verdict:
    rank = min(lost)
    named = ", ".join(f"node {node} ({reason})" for node, reason in sorted(lost.items()))
    return Verdict(
        ExitCode.JOB_FAILED,
        FailureKind.LOST_NODE,
        f"lost by Ray, with all its ranks: {named}",
        RestartAction.RESTART,
        node_rank=rank,
        nodes=job.nodes,
    )
