"""Ray: what its Jobs API is asked; the job's nodes are started there by `targets.raylets`.

All nodes, and whoever submits, see the run directory under the same path, where the job file lies. Ray's own
documents: docs.ray.io/en/latest/cluster/running-applications/job-submission and .../ray-security/token-auth.
"""

import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from bundle import capabilities, files
from bundle.errors import ExitCode, LaunchUnavailable, UsageError, shown
from bundle.files import json_digest
from bundle.launch.job import NAME, Job

_log = logging.getLogger(__name__)
T = TypeVar("T")

STOP, TOKEN = "stop", "token"  # beside a job's file: it is to save and end; that of a cluster of its own
_OBJECTS = 10**8  # bytes: what is handed around are lines of text; the rest of /dev/shm is the ranks'
# How often a job is looked at, and for how long its cluster may not answer meanwhile.
LOOK_SECONDS, PATIENCE_SECONDS = 2.0, 600


@dataclass(frozen=True)
class Options:
    """`address` of the dashboard, which takes jobs, "http://127.0.0.1:8265"; what runs our driver there.

    `restarts`: how often ranks are started again, in place or, when a machine is lost, on another, without a
    new checkpoint between; `wait`: the seconds until the machines are free; `preflight`: first every node
    does what the job will ask of it.
    """

    address: str = ""
    restarts: int = 0
    wait: int = 1800
    python: str = sys.executable
    preflight: bool = False

    def violations(self) -> Iterator[str]:
        """All that Ray would not take."""
        host, _, rest = self.address.partition("://")
        if self.address and (host not in ("http", "https") or not rest or not rest.isprintable()):
            yield f"--address {shown(self.address)}: that of Ray's dashboard, such as http://127.0.0.1:8265"


class State(NamedTuple):
    """What Ray says of a job: its state, why it is so, its exit code once it has ended."""

    name: str
    reason: str
    code: int | None


def placed(job: Job) -> Path:
    """Where a job's file belongs in its run directory: by a name that no other job has."""
    return job.directory.absolute() / "logs" / f"ray-{json_digest(job.dump())}"


def bundles(job: Job) -> list[dict[str, float]]:
    """What each machine is asked for; no two of them are taken of one machine."""
    resource = capabilities.of(job.backend).resource(job.generation)
    devices = {resource.ray: float(job.per_node)} if resource else {}
    return [{"CPU": 1.0} | devices for _ in range(job.nodes)]


def started_with(bundle: Mapping[str, float]) -> dict[str, str]:
    """What `ray start` is told of a machine that has just what a bundle asks for."""
    counted = {"CPU": "num-cpus", "GPU": "num-gpus"}
    said = {counted[name]: f"{count:g}" for name, count in bundle.items() if name in counted}
    if others := {name: count for name, count in bundle.items() if name not in counted}:
        said["resources"] = json.dumps(others)
    return said | {"object-store-memory": str(_OBJECTS)}


def request(job: Job, options: Options, workdir: Path) -> dict[str, Any]:
    """What `submit_job` is given. Raises UsageError with everything that is wrong."""
    if wrong := list(options.violations()):
        raise UsageError("no job of Ray can be written", wrong)
    words = [options.python, "-m", "bundle", "launch", "ray", f"--job={placed(job) / NAME}"]
    words += [f"--restarts={options.restarts}", f"--wait={options.wait}"]
    words += ["--preflight"] if options.preflight else []
    return {
        "entrypoint": f"cd {shlex.quote(str(workdir))} && exec {shlex.join(words)}",
        "metadata": {"recipe": job.recipe.name, "folder": str(placed(job))},
    }


def dry_run(job: Job, options: Options, workdir: Path) -> str:
    """What Ray would be asked, as JSON, and what of its machines the job's driver asks for then."""
    each, *_ = asked = bundles(job)
    placement = {"strategy": "STRICT_SPREAD", "bundles": len(asked), "each": each}
    return json.dumps(request(job, options, workdir) | {"placement": placement}, indent=2) + "\n"


def write(job: Job) -> Path:
    """Puts a job's file where its driver finds it, which nobody has asked to stop yet."""
    where = placed(job)
    where.mkdir(parents=True, exist_ok=True)
    (where / STOP).unlink(missing_ok=True)
    files.write_text(where / NAME, job.text())
    return where / NAME


def imported() -> Any:
    """The module ray, which authenticates by token unless somebody has said otherwise.

    Raises LaunchUnavailable where it is not installed.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray
        import ray.job_submission
    except ImportError as error:
        raise LaunchUnavailable("ray is not installed: pip install 'mcore-bundle[ray]'") from error
    return ray


def submit(job: Job, options: Options, workdir: Path) -> str:
    """Hands a job to Ray; returns its number and where it is. Raises LaunchUnavailable."""
    asked = request(job, options, workdir)
    client = _client(options.address)
    write(job)
    return f"{_answered(lambda: client.submit_job(**asked))}@{options.address}"


def state(name: str) -> State:
    """What Ray says of a job. Raises LaunchUnavailable where it does not know it, or does not answer."""
    number, _, address = name.partition("@")
    client = _client(address)
    return _state(_answered(lambda: client.get_job_info(number)))


def stop(name: str) -> None:
    """Has a job save and end, one that waits not begin."""
    number, _, address = name.partition("@")
    client = _client(address)
    said = _answered(lambda: client.get_job_info(number))
    folder = Path(str((said.metadata or {}).get("folder", "")))
    if _state(said).name == "RUNNING" and files.is_directory(folder):
        (folder / STOP).touch()  # Ray's own stop kills what is still writing after 3 s
    elif _state(said).code is None:
        _answered(lambda: client.stop_job(number))


def written(name: str) -> str:
    """All that a job has written."""
    number, _, address = name.partition("@")
    client = _client(address)
    return str(_answered(lambda: client.get_job_logs(number)))


def follow(name: str) -> Iterator[str]:
    """What a job writes, as it comes, until it has ended."""
    read = 0
    for _ in _looked_at(name):
        text = written(name)
        yield text[read:]
        read = len(text)


def wait(name: str) -> int:
    """The exit code of a job, once it has ended."""
    *_, last = _looked_at(name)
    assert last.code is not None, "it has ended"
    return last.code


def _looked_at(name: str) -> Iterator[State]:
    """How a job is, every now and then until it has ended; a cluster that is away may come back."""
    silent = 0.0
    while True:
        try:
            now, silent = state(name), 0.0
        except LaunchUnavailable as error:
            if silent >= PATIENCE_SECONDS:
                raise
            if not silent:
                _log.warning("%s; asks again for %d s", error, PATIENCE_SECONDS)
            silent += LOOK_SECONDS
        else:
            yield now
            if now.code is not None:
                return
        time.sleep(LOOK_SECONDS)


def _state(said: Any) -> State:
    name = said.status.value
    if name not in ("SUCCEEDED", "FAILED", "STOPPED"):
        return State(name, "", None)
    otherwise = {"SUCCEEDED": ExitCode.OK, "STOPPED": ExitCode.TERMINATED}.get(
        name, ExitCode.LAUNCH_UNAVAILABLE
    )
    code = otherwise if said.driver_exit_code is None else said.driver_exit_code
    # What Ray says of a driver that ended by itself is its log once more.
    lost = name == "FAILED" and said.driver_exit_code is None
    return State(name, files.printable((said.message or "").strip())[:300] if lost else "", int(code))


def _client(address: str) -> Any:
    ray = imported()
    return _answered(lambda: ray.job_submission.JobSubmissionClient(address))


def _answered(ask: Callable[[], T]) -> T:
    """What Ray answers. Raises LaunchUnavailable with what it says against the question."""
    try:
        return ask()
    except Exception as error:  # a class of its own for every way to fail, and RuntimeError for most
        raise LaunchUnavailable(f"Ray: {why(error)}") from error


def why(error: Exception) -> str:
    """What an error of Ray says, on one line; of one in a task, what was raised there."""
    cause = getattr(error, "cause", None) or error
    return files.printable(str(cause).strip())[:2000] or type(cause).__name__
