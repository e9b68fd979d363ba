"""The container of a node's task: the words of srun and of Apptainer before mcore-bundle's command.

The container is made by pyxis (github.com/NVIDIA/pyxis/wiki/Usage) over enroot, or by Apptainer
(apptainer.org/docs/user/latest/bind_paths_and_mounts.html). Both were read, not run.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from bundle.errors import format_value
from bundle.launch.job import Job
from bundle.targets import devices
from bundle.targets.mounts import Mount
from bundle.targets.slurm.options import SlurmOptions

_REGISTRY_IMAGE_PATTERN = re.compile(r"(?P<host>[^/#]+\.[^/#]+|[^/#]+:[0-9]+|localhost)/(?P<name>.+)")
# Apptainer takes any other name for a file, which no node has.
_APPTAINER_IMAGE = re.compile(r"\.{0,2}/.+|.+\.sif|[a-z][a-z0-9-]*://.+")
# The separators of mounts and of the paths in one mount. Other special characters: bash reads three in what
# pyxis passes to enroot, and Apptainer has an escape character.
_MOUNT_SEPARATOR, _PATH_SEPARATOR = ",", ":"
_UNMOUNTABLE_CHARACTERS_BY_RUNTIME = {"pyxis": '"$`', "apptainer": "\\"}


def find_unmountable_path_violations(job: Job, options: SlurmOptions, workdir: Path) -> Iterator[str]:
    """Yield a message for each text that would reach the container changed."""
    if not options.image:
        return
    if options.container == "apptainer" and not _APPTAINER_IMAGE.fullmatch(options.image):
        image = options.image
        yield f"--image {format_value(image)}: Apptainer needs /PATH.sif or docker://{image}"
    special = _MOUNT_SEPARATOR + _UNMOUNTABLE_CHARACTERS_BY_RUNTIME.get(options.container, "")
    texts = [(str(path), special + _PATH_SEPARATOR) for path in _list_work_and_run_directories(job, workdir)]
    for text, forbidden in texts + [(mount, special) for mount in options.mounts]:
        if characters := " or ".join(f"'{character}'" for character in forbidden if character in text):
            yield f"{format_value(text)}: {options.container} cannot mount a path that contains {characters}"


def build_command_prefix(job: Job, options: SlurmOptions, workdir: Path) -> Sequence[str]:
    """Return the words of srun, and of the program that it starts, up to mcore-bundle's command."""
    if not options.image:
        return ["--", options.python, "-m", "bundle"]
    mounts = [*_list_mount_specs(job, options, workdir), *_list_device_mounts(job, options)]
    if options.container == "apptainer":
        binds = [word for mount in mounts for word in ("--bind", mount)]
        gpus = ["--nv"] if job.backend == "cuda" else []
        container_command = [
            "apptainer",
            "exec",
            *gpus,
            "--no-home",
            "--pwd",
            str(workdir),
            *binds,
            options.image,
        ]
        return ["--", *container_command, "mcore-bundle"]
    match = _REGISTRY_IMAGE_PATTERN.fullmatch(options.image)
    # pyxis parts the registry from the name by "#"; a path, and a name without a registry, are as they are.
    image = f"{match['host']}#{match['name']}" if match else options.image
    return [
        f"--container-image={image}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={workdir}",
        "--no-container-mount-home",
        "--",
        "mcore-bundle",
    ]


def list_mounts(job: Job, options: SlurmOptions, workdir: Path) -> Sequence[Mount]:
    """Return the mounts of the container: the files of the nodes that it sees."""
    return [Mount.from_option(mount, workdir) for mount in _list_mount_specs(job, options, workdir)]


def _list_mount_specs(job: Job, options: SlurmOptions, workdir: Path) -> Sequence[str]:
    mount_options = [f"{path}:{path}" for path in _list_work_and_run_directories(job, workdir)]
    return mount_options + [mount if ":" in mount else f"{mount}:{mount}" for mount in options.mounts]


def _list_work_and_run_directories(job: Job, workdir: Path) -> Sequence[Path]:
    return list(dict.fromkeys((workdir, job.directory.absolute())))


def _list_device_mounts(job: Job, options: SlurmOptions) -> Iterator[str]:
    """Yield the mounts for devices other than GPUs, which pyxis and Apptainer mount in their own way.

    Both mount all of the host's /dev unless their site restricts that, by `mount dev = minimal` or
    ENROOT_RESTRICT_DEV. The hook of the latter runs before these mounts (enroot's runtime.sh).
    MELLANOX_VISIBLE_DEVICES is not set: enroot's 99-mellanox.sh does nothing without it, and with it hides
    the cards of other makers in /sys.
    """
    if job.backend == "ascend":
        yield from (f"{node}:{node}" for node in devices.list_npu_device_files(job.per_node))
        yield from (f"{path}:{path}:ro" for path in devices.NPU_DRIVER_PATHS)
    if options.rdma:
        yield f"{devices.RDMA_DEVICE_DIRECTORY}:{devices.RDMA_DEVICE_DIRECTORY}"
