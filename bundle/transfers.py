"""Copies between the host and a device, for which the host does not wait."""

import torch
from torch import Tensor


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return the values on `device`, in the order of its stream.

    CUDA copies from pageable memory when the stream gets there, and the host waits. So the host memory is
    pinned first.
    """
    pinned = values.pin_memory() if device.type == "cuda" and values.device.type == "cpu" else values
    return pinned.to(device, non_blocking=True)


class HostCopy:
    """A copy of a tensor for the host.

    A GPU writes it while the host goes on; other devices have written it when the copy has started.
    """

    def __init__(self, values: Tensor) -> None:
        """Start the copy, behind everything that the device has been given."""
        self._written: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._written = torch.cuda.Event()
            self._written.record()
        else:
            self._values = values.to("cpu", copy=True)

    def read(self) -> Tensor:
        """Return the values on the host, once they are written."""
        if self._written is not None:
            self._written.synchronize()
        return self._values
