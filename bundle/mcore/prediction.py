"""Multi-token prediction on a bare GPTModel: leaving it out of a forward pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def left_out(model: torch.nn.Module) -> Iterator[None]:
    """Inside, this bare GPTModel has no multi-token prediction: no layer of it runs, labels may be absent.

    For one forward pass at a time: the configuration is that of all chunks of a virtual pipeline.
    """
    config = model.config
    before = model.mtp_process, config.mtp_num_layers
    model.mtp_process, config.mtp_num_layers = False, None
    try:
        yield
    finally:
        model.mtp_process, config.mtp_num_layers = before
