"""Docker: the command that runs one node of a job in a container of this machine, and what it is asked.

The container sees the working directory and the run directory where they are here, and writes nowhere else;
it executes the job file, which lies in the run directory. What the words mean: docs.docker.com/reference/cli/
docker/container/run. Devices and driver of Ascend (targets.devices) were read about, not run.
"""

import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from bundle import files
from bundle.errors import ExitCode, LaunchUnavailable, UsageError, format_value
from bundle.files import digest_json
from bundle.launch import grace
from bundle.launch import job as job_file
from bundle.launch.command import Command
from bundle.launch.job import FILE_NAME, Job
from bundle.launch.orphans import prepare_parent_death_signal
from bundle.targets import devices
from bundle.targets.client import run_client
from bundle.targets.mounts import Mount
from bundle.targets.options import Grace, Preflight, Rdma, Restarts
from bundle.targets.states import JobState

# Where an image of ours keeps what its libraries compile, which goes with the container (images/README.md).
HOME = "/home/bundle"
# Memory that the network card writes to stays where it is.
_RDMA_OPTIONS = (f"--device={devices.RDMA_DEVICES}", "--cap-add=IPC_LOCK", "--ulimit=memlock=-1:-1")
_LABEL = "mcore-bundle.job"
_SIZE = re.compile(r"[1-9][0-9]*[bkmg]?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class DockerOptions:
    """What the engine wants to know, beside the job: the image, and what its user chooses.

    The values of the variables `environment` are handed on unseen. `user` will own what the container writes.
    """

    image: str = ""
    mounts: Annotated[
        tuple[str, ...],
        typer.Option("--mount", metavar="SRC[:DST[:ro]]", help="What it sees, beside here and the run."),
    ] = ()
    environment: Annotated[
        tuple[str, ...],
        typer.Option("--env", metavar="NAME", help="A variable of here that it gets: HF_TOKEN, ..."),
    ] = ()
    user: Annotated[
        str, typer.Option(metavar="UID:GID", help="Who it is; without it, we, in the group of our images.")
    ] = ""
    groups: Annotated[
        tuple[int, ...],
        typer.Option("--group", min=0, metavar="GID", help="A further group of it; else that of the NPUs."),
    ] = ()
    shared_memory: Annotated[str, typer.Option(metavar="SIZE", help="Size of /dev/shm.")] = "64g"
    rdma: Rdma = False
    grace_seconds: Grace = None
    restarts: Restarts = 0
    preflight: Preflight = False

    def find_violations(self) -> Iterator[str]:
        """All that docker would not take, or would take for something else."""
        if not re.fullmatch(r"[a-zA-Z0-9][\w.:/@-]*", self.image, re.ASCII):
            yield f"--image {format_value(self.image)}: no name of an image"
        for mount in self.mounts:
            source, _, rest = mount.partition(":")
            target, _, mode = rest.partition(":")
            if not source.startswith("/") or (rest and not target.startswith("/")) or mode not in ("", "ro"):
                yield f"--mount {format_value(mount)}: /SRC, /SRC:/DST or /SRC:/DST:ro"
        for name in self.environment:
            if not _VARIABLE.fullmatch(name):
                yield f"--env {format_value(name)}: the name of a variable, whose value is taken from here"
        if not _SIZE.fullmatch(self.shared_memory):
            yield f"--shared-memory {format_value(self.shared_memory)}: a size, such as 64g"


def get_job_directory(job: Job) -> Path:
    """Where a job's file belongs in its run directory: by a name that no other job has."""
    return job.directory.absolute() / "logs" / f"docker-{digest_json(job.dump())}"


def build_container_name(job: Job, node_rank: int) -> str:
    """The container of one node of a job: no other job has one of that name."""
    name = re.sub(r"[^a-zA-Z0-9_.-]+", "-", job.recipe.name).strip("-.")
    return f"mcore-bundle-{name}-{digest_json(job.dump())}-{node_rank}"


def build_command(
    job: Job, options: DockerOptions, workdir: Path, node_rank: int = 0, rendezvous: str = ""
) -> Command:
    """The command that runs one node. Raises UsageError with everything that it cannot hold."""
    paths = (workdir, job.directory.absolute())
    wrong = list(options.find_violations())
    wrong += [
        f"{format_value(str(p))}: docker reads : as its own" for p in dict.fromkeys(paths) if ":" in str(p)
    ]
    wrong += job_file.find_rendezvous_problems(job, rendezvous)
    if wrong:
        raise UsageError("no command of docker can be written", wrong)
    arguments = (
        *("docker", "run", "--detach"),
        f"--name={build_container_name(job, node_rank)}",
        f"--label={_LABEL}={digest_json(job.dump())}",
        *([f"--user={options.user}"] if options.user else []),
        *(f"--group-add={group}" for group in options.groups),
        # It writes to what is mounted, and to what goes with it.
        *("--read-only", "--tmpfs=/tmp:exec,mode=1777", f"--tmpfs={HOME}:exec,mode=1777"),
        *("--cap-drop=ALL", "--security-opt=no-new-privileges"),
        f"--shm-size={options.shared_memory}",
        f"--stop-timeout={options.grace_seconds or grace.estimate_save_seconds(job)}",
        # Nodes reach each other on any port. One node alone reaches out, and nobody it.
        *(["--network=host"] if job.nodes > 1 else []),
        *_list_device_options(job),
        *(_RDMA_OPTIONS if options.rdma else ()),
        *(f"--volume={mount}" for mount in _list_volumes(job, options, workdir)),
        f"--workdir={workdir}",
        *(f"--env={name}" for name in options.environment),
        options.image,
        *job_file.build_arguments(
            job,
            get_job_directory(job) / FILE_NAME,
            node_rank,
            rendezvous,
            options.restarts,
            preflight=options.preflight,
        ),
    )
    return Command(arguments)


def list_mounts(job: Job, options: DockerOptions, workdir: Path) -> Sequence[Mount]:
    """What the container sees of the disks of this machine."""
    return [Mount.from_option(volume, workdir) for volume in _list_volumes(job, options, workdir)]


def _list_volumes(job: Job, options: DockerOptions, workdir: Path) -> Sequence[str]:
    volumes = [f"{path}:{path}" for path in dict.fromkeys((workdir, job.directory.absolute()))]
    return volumes + [mount if ":" in mount else f"{mount}:{mount}" for mount in options.mounts]


def render_dry_run(job: Job, options: DockerOptions, workdir: Path, rendezvous: str = "") -> str:
    """What would run, a command for each node."""
    rendezvous = job_file.format_rendezvous(job, rendezvous)
    lines = [f"# executes {get_job_directory(job) / FILE_NAME}, which `mcore-bundle launch docker` writes"]
    for node in range(job.nodes):
        lines += [
            f"# node {node} of {job.nodes}",
            build_command(job, options, workdir, node, rendezvous).to_shell(),
        ]
    return "\n".join(lines) + "\n"


def submit(job: Job, options: DockerOptions, workdir: Path, node_rank: int = 0, rendezvous: str = "") -> str:
    """Starts one node; returns the name of its container. Raises LaunchUnavailable where docker will not."""
    node_command, directory = (
        build_command(job, options, workdir, node_rank, rendezvous),
        get_job_directory(job),
    )
    directory.mkdir(parents=True, exist_ok=True)
    files.write_text(directory / FILE_NAME, job.to_text())
    name = build_container_name(job, node_rank)
    if run_client("docker", "ps", "--all", "--quiet", f"--filter=name=^{name}$").strip():
        if query_state(name).code is None:
            raise LaunchUnavailable(
                f"container {name} runs this very job: `mcore-bundle launch logs docker:{name}`"
            )
        run_client("docker", "rm", name)
    run_client(*node_command.argv, seconds=None)  # it may fetch the image
    return name


def query_state(name: str) -> JobState:
    """What the engine says of a container. Raises LaunchUnavailable where it knows of none."""
    template = "{{.State.Status}} {{.State.OOMKilled}} {{.State.ExitCode}} {{.State.Error}}"
    status, killed, code, error = run_client(
        "docker", "inspect", "--type=container", f"--format={template}", name
    ).split(" ", 3)
    reason = "its limit of memory was reached" if killed == "true" else error.strip()
    exit_code = int(code) if status in ("exited", "dead") else None
    if status == "created" and code != "0":  # what the engine says of one that it could not start
        exit_code = int(ExitCode.LAUNCH_UNAVAILABLE)
    return JobState(status.upper(), reason, exit_code)


def stop(name: str) -> None:
    """Has a container's ranks save and end; it has the time for that which it was started with."""
    if query_state(name).code is None:
        run_client("docker", "kill", "--signal=TERM", name)


def read_log(name: str) -> str:
    """All that a container has written."""
    return run_client("docker", "logs", name, include_stderr=True)


def follow(name: str) -> Iterator[str]:
    """What a container writes, as it comes, until it has ended."""
    with subprocess.Popen(
        ["docker", "logs", "--follow", name],
        preexec_fn=prepare_parent_death_signal(signal.SIGTERM),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None, "it is a pipe"
        yield from process.stdout


def wait(name: str) -> int:
    """The exit code of a container, once it has ended."""
    return int(run_client("docker", "wait", name, seconds=None))


def _list_device_options(job: Job) -> Sequence[str]:
    """What the container gets of the machine's devices: as many as the job has ranks there."""
    if job.backend == "cuda":
        return [f"--gpus={job.per_node}"]
    return list_npu_options(job.per_node) if job.backend == "ascend" else []


def find_npu_unix_groups(device: Path = Path("/dev/davinci0")) -> tuple[int, ...]:
    """The group of this machine's NPUs, whose members alone may open them; () where it has none."""
    return (device.stat().st_gid,) if device.exists() else ()


def list_npu_options(count: int) -> list[str]:
    """What a container needs of the host for so many NPUs: their nodes, and the driver's files; no more."""
    nodes = [f"--device={device}" for device in devices.list_npu_device_files(count)]
    return nodes + [f"--volume={path}:{path}:ro" for path in devices.NPU_DRIVER]
