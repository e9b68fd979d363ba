"""The request to Slurm for the devices of a node: our option, or the user's option with their type."""

from collections.abc import Iterator, Mapping

from bundle import capabilities
from bundle.capabilities import SchedulerResource
from bundle.errors import format_value
from bundle.launch.job import Job
from bundle.targets.slurm.options import SlurmOptions, split_name_and_value

# Options that request devices per node as [TYPE:]NUMBER; --gres does so with one of these names.
_NODE_OPTIONS, _GRES_NAMES = ("gpus-per-node", "gres"), ("gpu", "npu")
_UNSUPPORTED_GPU_OPTIONS = ("gpus", "gpus-per-task", "gpus-per-socket")


def find_device_violations(job: Job, options: SlurmOptions) -> Iterator[str]:
    """Yield a message for each option that requests other devices than the plan, or in another way."""
    if (resource := _get_resource(job)) is None:
        return
    ours, typed = resource.slurm.format(job.per_node), resource.slurm.format(f"TYPE:{job.per_node}")
    for option in options.sbatch:
        name, _ = split_name_and_value(option)
        full_names = [
            full_name
            for full_name in (*_NODE_OPTIONS, *_UNSUPPORTED_GPU_OPTIONS)
            if full_name.startswith(name)
        ]
        count = _count_devices(option)
        if full_names and name not in full_names:
            yield f"--sbatch {format_value(option)}: sbatch may read it as --{full_names[0]}. Write it out"
        elif name in _UNSUPPORTED_GPU_OPTIONS:
            yield f"--sbatch {format_value(option)}: the job requests {ours}. Set a device type with {typed}"
        elif count not in (None, job.per_node):
            yield (
                f"--sbatch {format_value(option)}: requests {count} per node, but the job has"
                f" {job.per_node} (--devices-per-node)"
            )


def with_devices(job: Job, sbatch_options: Mapping[str, str]) -> dict[str, str]:
    """Return `sbatch_options` with our option for the devices first.

    Return `sbatch_options` alone where they request devices, or the job has none.
    """
    resource = _get_resource(job)
    if resource is None or any(_count_devices(f"{name}={value}") for name, value in sbatch_options.items()):
        return dict(sbatch_options)
    name, value = split_name_and_value(resource.slurm.format(job.per_node))
    both = ",".join(filter(None, (value, sbatch_options.get(name))))  # --gres also lists other resources
    return {name: both} | {
        other: other_value for other, other_value in sbatch_options.items() if other != name
    }


def _get_resource(job: Job) -> SchedulerResource | None:
    return capabilities.find_capabilities(job.backend).find_resource(job.generation)


def _count_devices(option: str) -> int | None:
    """Return the number of devices per node that an option requests; None for an unrelated option.

    The value is NUMBER, TYPE:NUMBER or a list of these. In --gres a name comes first, and a request without a
    number is one device (sbatch's manual page).
    """
    name, value = split_name_and_value(option)
    if name not in _NODE_OPTIONS:
        return None
    requests = [part.split(":") for part in value.split(",")]
    if name == "gres":
        requests = [parts for parts in requests if parts[0] in _GRES_NAMES]
    return sum(int(parts[-1]) if parts[-1].isdecimal() else 1 for parts in requests) if requests else None
