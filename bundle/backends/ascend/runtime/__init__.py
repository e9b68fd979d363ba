"""What differs on Ascend NPUs and needs torch. torch_npu is not imported: its operators are in torch.ops."""

from typing import NoReturn

from bundle.errors import EnvironmentUnfit


def prepare() -> NoReturn:
    """Raises EnvironmentUnfit: the core attention is there, what must stand around it is not."""
    raise EnvironmentUnfit(
        "backend ascend: training is not wired in yet. Its core attention is written, and tested over an"
        " emulated npu_fusion_attention; layers, devices and HCCL have met no NPU. `mcore-bundle plan` and"
        " `patches plan` answer for ascend; `backend: cpu` trains"
    )
