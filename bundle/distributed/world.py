"""The process group of all ranks: made from the rendezvous, ended in order."""

import gc
from datetime import timedelta

import torch
import torch.distributed as dist

from bundle.rendezvous import Rendezvous


def initialize(
    rendezvous: Rendezvous, store: dist.Store, collectives: str, timeout: timedelta, device: torch.device
) -> None:
    """Makes the default process group; `collectives` is the backend's name for torch.distributed."""
    dist.init_process_group(
        collectives,
        store=dist.PrefixStore("world", store),
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=timeout,
        # An accelerator's group is bound to it at once, so that a barrier does not guess the device.
        device_id=None if device.type == "cpu" else device,
    )


def store() -> dist.Store:
    """Returns the store of the default process group, which has no time limit of a collective."""
    return dist.distributed_c10d._get_default_store()


def destroy() -> None:
    """Ends all process groups after everybody has come here; safe when there is none.

    A process that exits with a group alive may abort while its threads end, which looks like a crash.
    """
    if not dist.is_initialized():
        return
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()
