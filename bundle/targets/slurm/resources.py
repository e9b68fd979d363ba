"""How Slurm is asked for the devices of a node: by our option, or by one that says their type as well."""

from collections.abc import Iterator, Mapping

from bundle import capabilities
from bundle.capabilities import SchedulerResource
from bundle.errors import format_value
from bundle.launch.job import Job
from bundle.targets.slurm.options import SlurmOptions, split_option

# Options that ask for so many of a node, as [TYPE:]NUMBER; of --gres, by one of these names.
_NODE_OPTIONS, _GRES_NAMES = ("gpus-per-node", "gres"), ("gpu", "npu")
_OTHER_OPTIONS = ("gpus", "gpus-per-task", "gpus-per-socket")


def find_violations(job: Job, options: SlurmOptions) -> Iterator[str]:
    """Every option that asks for other devices than were planned, or asks otherwise beside ours."""
    if (resource := _get_resource(job)) is None:
        return
    ours, typed = resource.slurm.format(job.per_node), resource.slurm.format(f"TYPE:{job.per_node}")
    for option in options.sbatch:
        name, _ = split_option(option)
        full_names = [
            full_name for full_name in (*_NODE_OPTIONS, *_OTHER_OPTIONS) if full_name.startswith(name)
        ]
        count = _count_devices(option)
        if full_names and name not in full_names:
            yield (
                f"--sbatch {format_value(option)}: sbatch may take it for --{full_names[0]}: say that in full"
            )
        elif name in _OTHER_OPTIONS:
            yield f"--sbatch {format_value(option)}: the job asks for {ours}; their type is said by {typed}"
        elif count not in (None, job.per_node):
            yield (
                f"--sbatch {format_value(option)}: asks for {count} of a node, and the job has {job.per_node}"
                " (--devices-per-node)"
            )


def with_devices(job: Job, sbatch_options: Mapping[str, str]) -> dict[str, str]:
    """The options of `sbatch_options` behind ours for the devices, unless one of them asks for these."""
    resource = _get_resource(job)
    if resource is None or any(_count_devices(f"{name}={value}") for name, value in sbatch_options.items()):
        return dict(sbatch_options)
    name, value = split_option(resource.slurm.format(job.per_node))
    both = ",".join(filter(None, (value, sbatch_options.get(name))))  # --gres lists what is no device, too
    return {name: both} | {
        other: other_value for other, other_value in sbatch_options.items() if other != name
    }


def _get_resource(job: Job) -> SchedulerResource | None:
    return capabilities.find_capabilities(job.backend).find_resource(job.generation)


def _count_devices(option: str) -> int | None:
    """How many devices of a node an option asks for; None: it is about something else.

    NUMBER, TYPE:NUMBER or a list of these; of --gres behind a name, and 1 where no number stands (sbatch's
    manual page).
    """
    name, value = split_option(option)
    if name not in _NODE_OPTIONS:
        return None
    requests = [part.split(":") for part in value.split(",")]
    if name == "gres":
        requests = [parts for parts in requests if parts[0] in _GRES_NAMES]
    return sum(int(parts[-1]) if parts[-1].isdecimal() else 1 for parts in requests) if requests else None
