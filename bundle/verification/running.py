"""One run of a measurement on this rank, in a process of its own."""

import importlib
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from bundle.backends import Runtime
from bundle.patches import applying
from bundle.verification.check import Observation
from bundle.verification.numbers import Bench, NotProvable
from bundle.verification.observing import Order, read_plan, scratch

_COLLECTIVES = 20  # seconds until a rank gives up on another one


def run(order: Order, rank: int, directory: Path, runtime: Runtime) -> Observation:
    """What this rank saw."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        return Observation(gap=_measure(order, rank, directory, runtime))
    except NotProvable as reason:
        return Observation(unprovable=str(reason))
    except Exception as error:  # noqa: BLE001  whatever megatron raises is the observation
        kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
        return Observation(raised=kinds, message=" ".join(str(error).split())[:300])


def _measure(order: Order, rank: int, directory: Path, runtime: Runtime) -> float:
    files = scratch(directory, order)
    device = runtime.device(rank)
    dist.init_process_group(
        runtime.collectives,
        store=dist.FileStore(str(files / "store"), order.world),
        rank=rank,
        world_size=order.world,
        timeout=timedelta(seconds=_COLLECTIVES),
    )
    applying.apply(read_plan(directory, order))
    module, name = order.measurement.split(":")
    measure = getattr(importlib.import_module(module), name)
    with runtime.megatron():
        return float(measure(Bench(runtime, device, files, _COLLECTIVES)))
