"""Docker: the command that runs one node of a job in a container of this machine, and its state.

The container sees the working directory and the run directory under their paths on this machine, and writes
nowhere else. It executes the job file, which lies in the run directory. Reference of the options:
docs.docker.com/reference/cli/docker/container/run. The parts for Ascend (targets.devices) were read, not run.
"""

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from bundle import files
from bundle.errors import ExitCode, TargetUnavailable, UsageError, format_value
from bundle.files import compute_short_json_digest
from bundle.launch import grace
from bundle.launch import job as job_file
from bundle.launch.command import Command
from bundle.launch.job import FILE_NAME, Job
from bundle.launch.orphans import prepare_parent_death_signal
from bundle.targets import devices, images
from bundle.targets.client import run_client
from bundle.targets.mounts import Mount
from bundle.targets.options import Grace, Preflight, Rdma, Restarts
from bundle.targets.states import JobState, ListedJob

# The network card writes to memory that must stay pinned.
_RDMA_OPTIONS = (f"--device={devices.RDMA_DEVICE_DIRECTORY}", "--cap-add=IPC_LOCK", "--ulimit=memlock=-1:-1")
# The labels of a container: who started it, and the run directory.
_OWNER_LABEL, _DIRECTORY_LABEL = "mcore-bundle.owner", "mcore-bundle.run-directory"
_ENDED_STATES = ("exited", "dead")
_SIZE_PATTERN = re.compile(r"[1-9][0-9]*[bkmg]?")
_VARIABLE_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class DockerOptions:
    """The engine's options beside the job: the image, and what the user chooses.

    The container gets the values of the variables `environment`; they are not read here. `user` owns the
    files that the container writes. `owner` is the user who starts it.
    """

    image: str = ""
    mounts: Annotated[
        tuple[str, ...],
        typer.Option("--mount", metavar="SRC[:DST[:ro]]", help="Mount another path in the container."),
    ] = ()
    environment: Annotated[
        tuple[str, ...],
        typer.Option("--env", metavar="NAME", help="Pass this environment variable, for example HF_TOKEN."),
    ] = ()
    user: Annotated[
        str,
        typer.Option(
            metavar="UID:GID",
            help="Run as this user. Default: your user, with group 0; for root, a user without rights.",
        ),
    ] = ""
    groups: Annotated[
        tuple[int, ...],
        typer.Option(
            "--group",
            min=0,
            metavar="GID",
            help="Add this group ID to the container. Default: the group of the NPU device files.",
        ),
    ] = ()
    shared_memory: Annotated[str, typer.Option(metavar="SIZE", help="Set the size of /dev/shm.")] = "64g"
    rdma: Rdma = False
    grace_seconds: Grace = None
    restarts: Restarts = 0
    preflight: Preflight = False
    owner: str = str(os.getuid())

    def find_violations(self) -> Iterator[str]:
        """Yield a message for each option that docker would refuse or misread."""
        if not re.fullmatch(r"[a-zA-Z0-9][\w.:/@-]*", self.image, re.ASCII):
            yield f"--image {format_value(self.image)}: not the name of an image"
        for mount in self.mounts:
            source, _, rest = mount.partition(":")
            target, _, mode = rest.partition(":")
            if not source.startswith("/") or (rest and not target.startswith("/")) or mode not in ("", "ro"):
                yield f"--mount {format_value(mount)}: must be /SRC, /SRC:/DST or /SRC:/DST:ro"
        for name in self.environment:
            if not _VARIABLE_PATTERN.fullmatch(name):
                yield (
                    f"--env {format_value(name)}: must be a variable name. Its value is read from your"
                    " environment"
                )
        if not _SIZE_PATTERN.fullmatch(self.shared_memory):
            yield f"--shared-memory {format_value(self.shared_memory)}: must be a size, such as 64g"


def choose_nonroot_user(directory: Path) -> str:
    """Return the user of a run's container where none is named: this user, in group 0, but never root.

    For root, it is the owner of the run directory, or the user of our images where root owns the directory.
    """
    owner = directory.stat().st_uid if directory.exists() else 0
    return f"{os.getuid() or owner or images.USER}:0"


def get_job_directory(job: Job) -> Path:
    """Return the directory of a job's files in its run directory; no other job has this name."""
    return job.directory.absolute() / "logs" / f"docker-{compute_short_json_digest(job.dump())}"


def build_container_name(job: Job, node_rank: int) -> str:
    """Return the name of the container of one node of a job; no other job has this name."""
    name = re.sub(r"[^a-zA-Z0-9_.-]+", "-", job.recipe.name).strip("-.")
    return f"mcore-bundle-{name}-{compute_short_json_digest(job.dump())}-{node_rank}"


def build_node_command(
    job: Job, options: DockerOptions, workdir: Path, node_rank: int = 0, rendezvous: str = ""
) -> Command:
    """Return the command that runs one node. Raise UsageError with every value that it cannot hold."""
    paths = (workdir, job.directory.absolute())
    wrong = list(options.find_violations())
    wrong += [
        f"{format_value(str(p))}: docker cannot mount a path that contains a colon"
        for p in dict.fromkeys(paths)
        if ":" in str(p)
    ]
    wrong += job_file.find_rendezvous_problems(job, rendezvous)
    if wrong:
        raise UsageError("the docker command cannot be generated", wrong)
    arguments = (
        *("docker", "run", "--detach"),
        f"--name={build_container_name(job, node_rank)}",
        f"--label={_OWNER_LABEL}={options.owner}",
        f"--label={_DIRECTORY_LABEL}={job.directory.absolute()}",
        *([f"--user={options.user}"] if options.user else []),
        *(f"--group-add={group}" for group in options.groups),
        # It writes to its mounts, and to memory that is lost with the container.
        *("--read-only", "--tmpfs=/tmp:exec,mode=1777", f"--tmpfs={images.HOME}:exec,mode=1777"),
        *("--cap-drop=ALL", "--security-opt=no-new-privileges"),
        f"--shm-size={options.shared_memory}",
        f"--stop-timeout={options.grace_seconds or grace.estimate_save_seconds(job)}",
        # Several nodes reach each other on any port. A single node needs no port that others can reach.
        *(["--network=host"] if job.nodes > 1 else []),
        *_list_device_options(job),
        *(_RDMA_OPTIONS if options.rdma else ()),
        *(f"--volume={mount}" for mount in _list_volume_mappings(job, options, workdir)),
        f"--workdir={workdir}",
        *(f"--env={name}" for name in options.environment),
        options.image,
        *job_file.build_train_arguments(
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
    """Return the mounts of the container: the files of this machine that it sees."""
    return [Mount.from_option(volume, workdir) for volume in _list_volume_mappings(job, options, workdir)]


def _list_volume_mappings(job: Job, options: DockerOptions, workdir: Path) -> Sequence[str]:
    volumes = [f"{path}:{path}" for path in dict.fromkeys((workdir, job.directory.absolute()))]
    return volumes + [mount if ":" in mount else f"{mount}:{mount}" for mount in options.mounts]


def render_dry_run(job: Job, options: DockerOptions, workdir: Path, rendezvous: str = "") -> str:
    """Return the text of a dry run: one command for each node."""
    rendezvous = job_file.get_rendezvous_or_placeholder(job, rendezvous)
    lines = [f"# executes {get_job_directory(job) / FILE_NAME}, which `mcore-bundle launch docker` writes"]
    for node in range(job.nodes):
        lines += [
            f"# node {node} of {job.nodes}",
            build_node_command(job, options, workdir, node, rendezvous).to_redacted_shell(),
        ]
    return "\n".join(lines) + "\n"


def submit(job: Job, options: DockerOptions, workdir: Path, node_rank: int = 0, rendezvous: str = "") -> str:
    """Start one node and return the name of its container.

    Raise TargetUnavailable where docker refuses, or where this job runs already. Raise UsageError where the
    container of root has a user who cannot enter `workdir`.
    """
    node_command, directory = (
        build_node_command(job, options, workdir, node_rank, rendezvous),
        get_job_directory(job),
    )
    uid, _, gid = options.user.partition(":")
    hands_over = os.getuid() == 0 and uid.isdecimal()  # only the image has the number of a name
    if hands_over and not _can_enter(workdir, int(uid), int(gid) if gid.isdecimal() else 0):
        raise UsageError(
            f"--user {options.user}: this user of the container cannot enter {workdir}. Change the mode of"
            " this directory, or set --user to its owner"
        )
    directory.mkdir(parents=True, exist_ok=True)
    files.write_text(directory / FILE_NAME, job.to_text())
    if hands_over:
        _chown_root_files(job.directory, int(uid))
    name = build_container_name(job, node_rank)
    if run_client("docker", "ps", "--all", "--quiet", f"--filter=name=^{name}$").strip():
        if query_state(name).code is None:
            raise TargetUnavailable(
                f"container {name} already runs this job: `mcore-bundle launch logs docker:{name}`"
            )
        run_client("docker", "rm", name)
    run_client(*node_command.argv, seconds=None)  # it may fetch the image
    return name


def list_jobs() -> Iterator[ListedJob]:
    """Yield the containers that this user started."""
    template = f'{{{{.Names}}}}|{{{{.State}}}}|{{{{.Label "{_DIRECTORY_LABEL}"}}}}'
    owner = f"--filter=label={_OWNER_LABEL}={os.getuid()}"
    for row in run_client("docker", "ps", "--all", owner, f"--format={template}").splitlines():
        name, state, directory = row.split("|", 2)
        yield ListedJob(name, state.upper(), state in _ENDED_STATES, Path(directory))


def _can_enter(directory: Path, uid: int, gid: int) -> bool:
    """Return whether a user without rights may look up the names in a directory."""
    place = directory.stat()
    bit = 0o100 if place.st_uid == uid else 0o010 if place.st_gid == gid else 0o001
    return bool(place.st_mode & bit)


def _chown_root_files(directory: Path, uid: int) -> None:
    """Give root's files in a run directory to a user."""
    for _, _, names, descriptor in os.fwalk(directory):  # which follows no links
        for name in (".", *names):
            if os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_uid == 0:
                os.chown(name, uid, -1, dir_fd=descriptor, follow_symlinks=False)


def query_state(name: str) -> JobState:
    """Return the state of a container as the engine reports it.

    Raise TargetUnavailable where the engine does not know the container.
    """
    template = "{{.State.Status}} {{.State.OOMKilled}} {{.State.ExitCode}} {{.State.Error}}"
    status, killed, code, error = run_client(
        "docker", "inspect", "--type=container", f"--format={template}", name
    ).split(" ", 3)
    reason = "the container reached its memory limit" if killed == "true" else error.strip()
    exit_code = int(code) if status in _ENDED_STATES else None
    if status == "created" and code != "0":  # the engine could not start it
        exit_code = int(ExitCode.LAUNCH_UNAVAILABLE)
    return JobState(status.upper(), reason, exit_code)


def request_stop(name: str) -> None:
    """Tell the ranks of a container to save and end. Its stop timeout was set when it was started."""
    if query_state(name).code is None:
        run_client("docker", "kill", "--signal=TERM", name)


def read_log(name: str) -> str:
    """Return everything that a container has written."""
    return run_client("docker", "logs", name, include_stderr=True)


def follow(name: str) -> Iterator[str]:
    """Yield what a container writes, as it comes, until the container has ended."""
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
    """Wait until a container has ended and return its exit code."""
    return int(run_client("docker", "wait", name, seconds=None))


def _list_device_options(job: Job) -> Sequence[str]:
    """Return the options for the machine's devices: one device for each rank of the node."""
    if job.backend == "cuda":
        return [f"--gpus={job.per_node}"]
    return list_npu_options(job.per_node) if job.backend == "ascend" else []


def find_npu_unix_groups(device: Path = Path("/dev/davinci0")) -> tuple[int, ...]:
    """Return the group whose members may open this machine's NPUs; () where it has no NPU."""
    return (device.stat().st_gid,) if device.exists() else ()


def list_npu_options(count: int) -> list[str]:
    """Return the options for `count` NPUs: their device files and the driver's files, nothing more."""
    nodes = [f"--device={device}" for device in devices.list_npu_device_files(count)]
    return nodes + [f"--volume={path}:{path}:ro" for path in devices.NPU_DRIVER_PATHS]
