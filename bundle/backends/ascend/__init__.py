"""Ascend NPUs. torch-npu comes first, before megatron is imported; `runtime` imports megatron."""

import sys
import warnings
from typing import TYPE_CHECKING

from bundle.errors import EnvironmentUnfit

if TYPE_CHECKING:
    from bundle.backends import Runtime

_MINDSPEED_ADAPTOR_MODULES = (
    "mindspeed.megatron_adaptor",
    "megatron_adaptor",
)  # MindSpeed's, to 0.16, and the newer one


def set_up_runtime() -> "Runtime":
    """Return the runtime of NPUs. torch.cuda means NPUs from then on, for the life of this process.

    Raises EnvironmentUnfit where torch sees no NPU, or megatron was imported already.
    """
    redirect_cuda_to_npu()
    from bundle.backends.ascend import facade

    facade.replace_attributes()
    # It imports megatron, which must meet the facade.
    from bundle.backends.ascend.runtime import AscendRuntime

    return AscendRuntime()


def redirect_cuda_to_npu() -> None:
    """Load torch-npu and its transfer_to_npu, by which torch.cuda and NCCL mean NPUs and HCCL.

    Raises EnvironmentUnfit.
    """
    if imported := [name for name in _MINDSPEED_ADAPTOR_MODULES if name in sys.modules]:
        raise EnvironmentUnfit(
            f"backend ascend: {imported[0]} was imported in this process. It has replaced functions that our"
            " layers and patches replace, too. Do not import it. Set backend_options.mindspeed instead, which"
            " imports it at the right time"
        )
    try:
        import torch
        import torch_npu
    except (ImportError, OSError, RuntimeError) as error:
        raise EnvironmentUnfit(
            "backend ascend: torch-npu cannot be loaded. Install the version for this torch and CANN, and"
            " source CANN's set_env.sh",
            [f"{type(error).__name__}: {error}"],
        ) from error
    if not torch.npu.is_available():
        raise EnvironmentUnfit(
            f"backend ascend: torch-npu {torch_npu.__version__} sees no NPU. Run `mcore-bundle doctor` for"
            " the cause, or set `backend: cpu`"
        )
    if "megatron.core.jit" in sys.modules and "torch_npu.contrib.transfer_to_npu" not in sys.modules:
        raise EnvironmentUnfit(
            "backend ascend: megatron.core was imported already and uses parts of torch.cuda. Prepare the"
            " backend first"
        )
    with warnings.catch_warnings(record=True):  # it tells each name that it replaces, whatever is ignored
        from torch_npu.contrib import transfer_to_npu  # noqa: F401
