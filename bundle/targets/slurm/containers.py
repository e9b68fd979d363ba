"""The container of a node's task: the words of srun, and of Apptainer, that come before the verb.

By pyxis (github.com/NVIDIA/pyxis/wiki/Usage), over enroot, or by Apptainer (apptainer.org/docs/user/latest/
bind_paths_and_mounts.html). Both were read, not run.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from bundle.errors import shown
from bundle.launch.job import Job
from bundle.targets import devices
from bundle.targets.mounts import Mount
from bundle.targets.slurm.options import Options

_IMAGE = re.compile(r"(?P<host>[^/#]+\.[^/#]+|[^/#]+:[0-9]+|localhost)/(?P<name>.+)")
# Any other name is to Apptainer that of a file, which no node has.
_OF_APPTAINER = re.compile(r"\.{0,2}/.+|.+\.sif|[a-z][a-z0-9-]*://.+")
# What parts mounts from each other, and what parts the paths of one; in what pyxis hands on to enroot, bash
# reads three more, and Apptainer has an escape.
_PARTS_MOUNTS, _PARTS_PATHS = ",", ":"
_READ = {"pyxis": '"$`', "apptainer": "\\"}


def violations(job: Job, options: Options, workdir: Path) -> Iterator[str]:
    """All that would reach the container as something else."""
    if not options.image:
        return
    if options.container == "apptainer" and not _OF_APPTAINER.fullmatch(options.image):
        yield f"--image {shown(options.image)}: to Apptainer a file: /PATH.sif, or docker://{options.image}"
    special = _PARTS_MOUNTS + _READ.get(options.container, "")
    texts = [(str(path), special + _PARTS_PATHS) for path in _seen(job, workdir)]
    for text, none_of in texts + [(mount, special) for mount in options.mounts]:
        if held := "".join(character for character in none_of if character in text):
            yield f"{shown(text)}: as a mount of {options.container} it may not hold any of {held}"


def inside(job: Job, options: Options, workdir: Path) -> Sequence[str]:
    """The words of srun, and those of what runs in its place, up to the verb."""
    if not options.image:
        return ["--", options.python, "-m", "bundle"]
    mounts = [*_mounts(job, options, workdir), *_of_devices(job, options)]
    if options.container == "apptainer":
        binds = [word for mount in mounts for word in ("--bind", mount)]
        gpus = ["--nv"] if job.backend == "cuda" else []
        inner = ["apptainer", "exec", *gpus, "--no-home", "--pwd", str(workdir), *binds, options.image]
        return ["--", *inner, "mcore-bundle"]
    match = _IMAGE.fullmatch(options.image)
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


def mounts(job: Job, options: Options, workdir: Path) -> Sequence[Mount]:
    """What the container sees of the disks."""
    return [Mount.read(each, workdir) for each in _mounts(job, options, workdir)]


def _mounts(job: Job, options: Options, workdir: Path) -> Sequence[str]:
    own = [f"{path}:{path}" for path in _seen(job, workdir)]
    return own + [mount if ":" in mount else f"{mount}:{mount}" for mount in options.mounts]


def _seen(job: Job, workdir: Path) -> Sequence[Path]:
    return list(dict.fromkeys((workdir, job.directory.absolute())))


def _of_devices(job: Job, options: Options) -> Iterator[str]:
    """The mounts for devices, but for GPUs, which either has a way of its own for.

    Both have all of the host's /dev unless their site says otherwise: ENROOT_RESTRICT_DEV, whose hook runs
    before these mounts (enroot's runtime.sh), and `mount dev = minimal`. MELLANOX_VISIBLE_DEVICES is not set:
    enroot's 99-mellanox.sh does nothing without it, and with it hides the cards of other makers in /sys.
    """
    if job.backend == "ascend":
        yield from (f"{node}:{node}" for node in devices.npus(job.per_node))
        yield from (f"{path}:{path}:ro" for path in devices.NPU_DRIVER)
    if options.rdma:
        yield f"{devices.RDMA}:{devices.RDMA}"
