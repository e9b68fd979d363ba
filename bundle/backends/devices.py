"""The accelerator of a rank."""

import torch

from bundle.errors import EnvironmentUnfit


def select_device(device_type: str, local_rank: int, *, noun: str, visible_variable: str) -> torch.device:
    """Return the device with this rank's number among the visible ones, after making it the current one.

    Megatron builds on the current device. `device_type` is torch's name of the device type,
    `visible_variable` the variable that selects the visible devices of a process. Raises EnvironmentUnfit
    where there are too few.
    """
    accelerator = getattr(torch, device_type)
    count = accelerator.device_count()
    if local_rank >= count:
        raise EnvironmentUnfit(
            f"local rank {local_rank} has no {noun}: {count} visible. Start at most {count} ranks on this"
            f" node (devices.per_node), or make more of them visible ({visible_variable})"
        )
    accelerator.set_device(local_rank)
    return torch.device(device_type, local_rank)
