"""A request to stop (SIGTERM), and when all ranks have heard of it."""

import signal

import torch
import torch.distributed as dist

from bundle.launch import outcomes


class StopRequest:
    """Takes SIGTERM from now on; the loop asks between steps, because only there a checkpoint is possible."""

    def __init__(self, device: torch.device) -> None:
        """Installs the handler (main thread only); flags are exchanged on `device`."""
        self.device = device
        self.heard = False
        signal.signal(signal.SIGTERM, self._hear)
        # The launcher may have been told to stop before this process could take a signal.
        self.heard = self.heard or outcomes.asked_to_stop()

    def agreed(self) -> bool:
        """Returns whether any rank was asked to stop; a collective: all ranks stop at the same step."""
        flag = torch.tensor([int(self.heard)], dtype=torch.int32, device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def _hear(self, _number: int, _frame: object) -> None:
        self.heard = True
