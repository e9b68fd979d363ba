"""Ray: the requests to its Jobs API. `targets.raylets` starts the job's nodes there.

The run directory, which holds the job file, has the same path on all nodes and where the job is submitted.
Ray's documents: docs.ray.io/en/latest/cluster/running-applications/job-submission and
.../ray-security/token-auth.
"""

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from bundle import capabilities, files
from bundle.errors import ExitCode, TargetUnavailable, UsageError, format_value
from bundle.files import compute_short_json_digest
from bundle.launch.command import NODE_WAIT_SECONDS
from bundle.launch.job import FILE_NAME, Job
from bundle.targets.client import CLIENT_IMPORT_THREAD_LOCK
from bundle.targets.options import Preflight, Restarts
from bundle.targets.states import (
    JobState,
    ListedJob,
    TargetNotConfigured,
    find_exit_code,
    yield_polled_states,
)

T = TypeVar("T")

# Files beside the job file: the request to save and end, and the token of the job's own cluster.
STOP_NAME, TOKEN_NAME = "stop", "token"
_OBJECT_STORE_BYTES = 10**8  # only lines of text are exchanged; ranks need the rest of /dev/shm
POLL_SECONDS = 2.0
_SHELL_FAILURE_EXIT_CODES = (
    126,
    127,
)  # the codes of a shell for a program that it cannot run or does not find
# Ray's own variable for the dashboard that takes jobs, and the address of a dashboard on this machine.
_ADDRESS_VARIABLE, _LOCAL_ADDRESS = "RAY_API_SERVER_ADDRESS", "http://127.0.0.1:8265"


@dataclass(frozen=True)
class RayOptions:
    """Ray's options beside the job; `python` runs our driver on the cluster."""

    address: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Submit the job to the cluster with this dashboard. Default: the cluster of this machine.",
        ),
    ] = ""
    restarts: Restarts = 0
    preflight: Preflight = False
    wait: Annotated[
        int, typer.Option(min=1, metavar="SECONDS", help="Wait at most this time for free machines.")
    ] = NODE_WAIT_SECONDS
    python: str = sys.executable

    def find_violations(self) -> Iterator[str]:
        """Yield a message for each option that Ray would refuse."""
        host, _, rest = self.address.partition("://")
        if self.address and (host not in ("http", "https") or not rest or not rest.isprintable()):
            yield (
                f"--address {format_value(self.address)}: must be the URL of a Ray dashboard, such as"
                " http://127.0.0.1:8265"
            )


def get_job_directory(job: Job) -> Path:
    """Return the directory of a job's files in its run directory; no other job has this name."""
    return job.directory.absolute() / "logs" / f"ray-{compute_short_json_digest(job.dump())}"


def build_placement_bundles(job: Job) -> list[dict[str, float]]:
    """Return the resources to request for each node; each bundle needs its own machine."""
    resource = capabilities.find_capabilities(job.backend).find_resource(job.generation)
    devices = {resource.ray: float(job.per_node)} if resource else {}
    return [{"CPU": 1.0} | devices for _ in range(job.nodes)]


def build_start_command_options(bundle: Mapping[str, float]) -> dict[str, str]:
    """Return the options of `ray start` for a machine with exactly the resources of a bundle."""
    option_names = {"CPU": "num-cpus", "GPU": "num-gpus"}
    options = {option_names[name]: f"{count:g}" for name, count in bundle.items() if name in option_names}
    if custom_resources := {name: count for name, count in bundle.items() if name not in option_names}:
        options["resources"] = json.dumps(custom_resources)
    return options | {"object-store-memory": str(_OBJECT_STORE_BYTES)}


def build_request(job: Job, options: RayOptions, workdir: Path) -> dict[str, Any]:
    """Return the arguments of `submit_job`. Raise UsageError with everything that is wrong."""
    if wrong := list(options.find_violations()):
        raise UsageError("the Ray job cannot be generated", wrong)
    arguments = [
        options.python,
        "-m",
        "bundle",
        "launch",
        "ray",
        f"--job={get_job_directory(job) / FILE_NAME}",
    ]
    arguments += [f"--restarts={options.restarts}", f"--wait={options.wait}"]
    arguments += ["--preflight"] if options.preflight else []
    return {
        "entrypoint": f"cd {shlex.quote(str(workdir))} && exec {shlex.join(arguments)}",
        "metadata": {"recipe": job.recipe.name, "folder": str(get_job_directory(job))},
    }


def render_dry_run(job: Job, options: RayOptions, workdir: Path) -> str:
    """Return the request to Ray as JSON, with the machines that the job's driver will request."""
    bundle, *_ = all_bundles = build_placement_bundles(job)
    placement = {"strategy": "STRICT_SPREAD", "bundles": len(all_bundles), "each": bundle}
    return json.dumps(build_request(job, options, workdir) | {"placement": placement}, indent=2) + "\n"


def write_job_file(job: Job) -> Path:
    """Write a job's file where its driver reads it, remove an old request to stop, and return the path."""
    directory = get_job_directory(job)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / STOP_NAME).unlink(missing_ok=True)
    files.write_text(directory / FILE_NAME, job.to_text())
    return directory / FILE_NAME


def import_ray() -> Any:
    """Return the module ray; it authenticates by token unless RAY_AUTH_MODE says otherwise.

    Raise TargetNotConfigured where it is not installed.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        with CLIENT_IMPORT_THREAD_LOCK:
            import ray
            import ray.job_submission
    except ImportError as error:
        raise TargetNotConfigured("ray is not installed: pip install 'mcore-bundle[ray]'") from error
    return ray


def submit(job: Job, options: RayOptions, workdir: Path) -> str:
    """Submit a job to Ray and return its number and address as NUMBER@ADDRESS.

    Raise TargetUnavailable where Ray refuses or does not answer.
    """
    job_request = build_request(job, options, workdir)
    client = _connect(options.address)
    write_job_file(job)
    return f"{_call_ray(lambda: client.submit_job(**job_request))}@{options.address}"


def list_jobs() -> Iterator[ListedJob]:
    """Yield the jobs that `submit` submitted to the cluster of `_ADDRESS_VARIABLE`, or of this machine.

    Ray does not tell users apart. Raise TargetNotConfigured where no address is set and no dashboard answers.
    """
    address = os.environ.get(_ADDRESS_VARIABLE, "")
    try:
        client = _connect(address or _LOCAL_ADDRESS)
    except TargetUnavailable as error:
        if address:
            raise
        raise TargetNotConfigured(f"{error}. Set {_ADDRESS_VARIABLE}") from error
    for info in _call_ray(client.list_jobs):
        if info.submission_id and (folder := (info.metadata or {}).get("folder")):
            state = _parse_state(info)
            name = f"{info.submission_id}@{client.get_address()}"
            yield ListedJob(name, state.name, state.has_ended, Path(folder).parent.parent)


def query_state(name: str) -> JobState:
    """Return the state of a job as Ray reports it.

    Raise TargetUnavailable where Ray does not know the job, or does not answer.
    """
    number, _, address = name.partition("@")
    client = _connect(address)
    return _parse_state(_call_ray(lambda: client.get_job_info(number)))


def request_stop(name: str) -> None:
    """Tell a running job to save and end; a waiting job does not begin."""
    number, _, address = name.partition("@")
    client = _connect(address)
    info = _call_ray(lambda: client.get_job_info(number))
    folder = Path(str((info.metadata or {}).get("folder", "")))
    if _parse_state(info).name == "RUNNING" and files.is_directory(folder):
        (folder / STOP_NAME).touch()  # Ray's own stop kills what is still writing after 3 s
    elif _parse_state(info).code is None:
        _call_ray(lambda: client.stop_job(number))


def read_log(name: str) -> str:
    """Return everything that a job has written."""
    number, _, address = name.partition("@")
    client = _connect(address)
    return str(_call_ray(lambda: client.get_job_logs(number)))


def follow(name: str) -> Iterator[str]:
    """Yield what a job writes, as it comes, until the job has ended."""
    offset = 0
    for _ in _poll_states(name):
        text = read_log(name)
        yield text[offset:]
        offset = len(text)


def wait(name: str) -> int:
    """Wait until a job has ended and return its exit code."""
    return find_exit_code(_poll_states(name))


def _poll_states(name: str) -> Iterator[JobState]:
    return yield_polled_states(lambda: query_state(name), POLL_SECONDS)


def _parse_state(info: Any) -> JobState:
    name = info.status.value
    if name not in ("SUCCEEDED", "FAILED", "STOPPED"):
        return JobState(name, "", None)
    default_code = {"SUCCEEDED": ExitCode.OK, "STOPPED": ExitCode.TERMINATED}.get(
        name, ExitCode.LAUNCH_UNAVAILABLE
    )
    code = default_code if info.driver_exit_code is None else int(info.driver_exit_code)
    if code < 0:  # a signal ended the driver; shells and Slurm report it like this
        code = 128 - code
    if code in _SHELL_FAILURE_EXIT_CODES:
        return JobState(
            name, "the shell could not start Python on the cluster", int(ExitCode.LAUNCH_UNAVAILABLE)
        )
    # Ray's message about a driver that ended by itself only repeats its log.
    is_lost = name == "FAILED" and info.driver_exit_code is None
    return JobState(name, files.to_printable((info.message or "").strip())[:300] if is_lost else "", code)


def _connect(address: str) -> Any:
    ray = import_ray()
    return _call_ray(lambda: ray.job_submission.JobSubmissionClient(address))


def _call_ray(call: Callable[[], T]) -> T:
    """Return Ray's answer. Raise TargetUnavailable with Ray's message where the call fails."""
    try:
        return call()
    except Exception as error:  # Ray raises many classes, and RuntimeError for most failures
        raise TargetUnavailable(f"Ray: {describe_error(error)}") from error


def describe_error(error: Exception) -> str:
    """Return the text of an error of Ray; for an error in a task, the text of its cause."""
    cause = getattr(error, "cause", None) or error
    return files.to_printable(str(cause).strip())[:2000] or type(cause).__name__
