"""How Slurm is asked for the devices of a node: by our option, or by one that says their type as well."""

from collections.abc import Iterator, Mapping

from bundle import capabilities
from bundle.capabilities import Resource
from bundle.errors import shown
from bundle.launch.job import Job
from bundle.targets.slurm.options import Options, named

# Options that ask for so many of a node, as [TYPE:]NUMBER; of --gres, by one of these names.
_OF_NODE, _GRES = ("gpus-per-node", "gres"), ("gpu", "npu")
_OTHERWISE = ("gpus", "gpus-per-task", "gpus-per-socket")


def violations(job: Job, options: Options) -> Iterator[str]:
    """Every option that asks for other devices than were planned, or asks otherwise beside ours."""
    if (resource := _resource(job)) is None:
        return
    ours, typed = resource.slurm.format(job.per_node), resource.slurm.format(f"TYPE:{job.per_node}")
    for option in options.sbatch:
        name, _ = named(option)
        known = [each for each in (*_OF_NODE, *_OTHERWISE) if each.startswith(name)]
        count = _asked(option)
        if known and name not in known:
            yield f"--sbatch {shown(option)}: sbatch may take it for --{known[0]}: say that in full"
        elif name in _OTHERWISE:
            yield f"--sbatch {shown(option)}: the job asks for {ours}; their type is said by {typed}"
        elif count not in (None, job.per_node):
            yield (
                f"--sbatch {shown(option)}: asks for {count} of a node, and the job has {job.per_node}"
                " (--devices-per-node)"
            )


def with_devices(job: Job, theirs: Mapping[str, str]) -> dict[str, str]:
    """The options of `theirs` behind ours for the devices, unless one of them asks for these."""
    resource = _resource(job)
    if resource is None or any(_asked(f"{name}={value}") for name, value in theirs.items()):
        return dict(theirs)
    name, value = named(resource.slurm.format(job.per_node))
    both = ",".join(filter(None, (value, theirs.get(name))))  # --gres lists what is no device, too
    return {name: both} | {other: said for other, said in theirs.items() if other != name}


def _resource(job: Job) -> Resource | None:
    return capabilities.of(job.backend).resource(job.generation)


def _asked(option: str) -> int | None:
    """How many devices of a node an option asks for; None: it is about something else.

    NUMBER, TYPE:NUMBER or a list of these; of --gres behind a name, and 1 where no number stands (sbatch's
    manual page).
    """
    name, value = named(option)
    if name not in _OF_NODE:
        return None
    each = [part.split(":") for part in value.split(",")]
    if name == "gres":
        each = [parts for parts in each if parts[0] in _GRES]
    return sum(int(parts[-1]) if parts[-1].isdecimal() else 1 for parts in each) if each else None
