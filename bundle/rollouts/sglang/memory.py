"""The memory of a device that a trainer shares with a server."""

from typing import Any, NamedTuple

import torch

from bundle.errors import JobFailed, format_bytes
from bundle.launch.job import Job
from bundle.planning.rollout import has_colocated_servers

_MAX_MEM_FRACTION_STATIC = 0.95  # of the free memory
_REQUIRED_PLANNED_TRAINER_MEMORY_SHARE = 0.9  # of what the plan counts, which may be too much


class TrainerMemory(NamedTuple):
    """The memory of `device`; `needed` is what the trainer must be able to have while it learns [bytes].

    `server_part` of all memory is the server's; None: what the server chooses.
    """

    device: torch.device
    needed: int
    server_part: float | None = None

    @classmethod
    def from_job(cls, job: Job, device: torch.device) -> "TrainerMemory | None":
        """Return the memory that a job shares with servers of its own; None without them, and on a CPU."""
        if job.recipe.rl is None or not has_colocated_servers(job.recipe) or device.type == "cpu":
            return None
        part = job.mem_fraction_static or job.recipe.rl.rollout.mem_fraction_static
        return cls(device, int(_REQUIRED_PLANNED_TRAINER_MEMORY_SHARE * job.learning_bytes), part)

    @property
    def _device_module(self) -> Any:
        return torch.get_device_module(self.device)

    def release_cache(self) -> None:
        """Give back what no tensor uses, so that the server can have it."""
        self._device_module.empty_cache()

    def read_free_and_trainer_bytes(self) -> int:
        """Return what is free and what the trainer has [bytes]."""
        return int(
            self._device_module.mem_get_info(self.device)[0]
            + self._device_module.memory_reserved(self.device)
        )

    def compute_mem_fraction_static(self) -> float | None:
        """Return the server's part of the free memory, in which SGLang counts; None: it chooses.

        Raise JobFailed where less is free: another process uses the device, such as a second run.
        """
        if self.server_part is None:
            return None
        self.release_cache()
        free, total = self._device_module.mem_get_info(self.device)
        if self.server_part * total > free:
            part = format_bytes(int(self.server_part * total))
            raise JobFailed(
                f"rl.rollout.mem_fraction_static: the server needs {part} of device memory, but only"
                f" {format_bytes(free)} are free. End other processes on the device, or lower this fraction."
            )
        return float(min(self.server_part * total / free, _MAX_MEM_FRACTION_STATIC))
