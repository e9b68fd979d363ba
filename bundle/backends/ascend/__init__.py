"""What differs on Ascend NPUs and needs torch. torch_npu is not imported: its operators are in torch.ops."""

from typing import NoReturn

from bundle.capabilities.ascend import ASCEND
from bundle.errors import EnvironmentUnfit


def prepare() -> NoReturn:
    """Raises EnvironmentUnfit: the core attention is there, what must stand around it is not."""
    raise EnvironmentUnfit(ASCEND.refusal or "")
