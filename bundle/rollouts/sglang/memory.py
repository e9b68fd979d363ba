"""The memory of a device that a trainer shares with a server."""

from typing import Any, NamedTuple

import torch

from bundle.errors import JobFailed, format_bytes

_MOST = 0.95  # of the free memory


class TrainerMemory(NamedTuple):
    """The memory of `device`; `needed` is what the trainer must be able to have while it learns [bytes]."""

    device: torch.device
    needed: int

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.device)

    def release_cache(self) -> None:
        """Give back what no tensor uses, so that the server can have it."""
        self._module.empty_cache()

    def read_free_and_reserved(self) -> int:
        """Return what is free and what the trainer has [bytes]."""
        return int(self._module.mem_get_info(self.device)[0] + self._module.memory_reserved(self.device))

    def convert_to_free_part(self, part_of_total: float) -> float:
        """Return a part of all memory as a part of the free memory, in which SGLang counts.

        Raise JobFailed where less is free: another process uses the device, such as a second run.
        """
        self.release_cache()
        free, total = self._module.mem_get_info(self.device)
        if part_of_total * total > free:
            part = format_bytes(int(part_of_total * total))
            raise JobFailed(
                f"rl.rollout.mem_fraction_static: {part} of the device are the server's, and"
                f" {format_bytes(free)} are free. End what else uses the device, or lower it."
            )
        return float(min(part_of_total * total / free, _MOST))
