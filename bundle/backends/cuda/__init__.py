"""NVIDIA GPUs. Libraries come first, before megatron is imported; `runtime` imports megatron."""

import ctypes
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bundle.backends.cuda.weight_gradients import provide_extension
from bundle.errors import EnvironmentUnfit

if TYPE_CHECKING:
    from bundle.backends import Runtime


def set_up_runtime() -> "Runtime":
    """Return the runtime of NVIDIA GPUs, after loading the libraries that megatron looks for at import.

    Raises EnvironmentUnfit where torch sees no GPU or Transformer Engine cannot be loaded.
    """
    load_cudnn_and_transformer_engine()
    provide_extension()
    disable_pointwise_autotuning()
    # It imports megatron, which takes what it finds loaded.
    from bundle.backends.cuda.runtime import CudaRuntime

    return CudaRuntime()


def load_cudnn_and_transformer_engine() -> None:
    """Load cuDNN and Transformer Engine, in the order in which they work together.

    Without Transformer Engine megatron-core imports without a word and fails in the first layer: so it is
    loaded here, where the reason can still be told. Raises EnvironmentUnfit.
    """
    if not torch.cuda.is_available():
        raise EnvironmentUnfit(
            f"backend cuda: torch {torch.__version__} (built for CUDA {torch.version.cuda}) sees no GPU."
            " Run `mcore-bundle doctor` for the cause, or set `backend: cpu`"
        )
    for library in find_packaged_cudnn_libraries(_find_search_path("nvidia")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError, AssertionError, RuntimeError) as error:
        raise EnvironmentUnfit(
            "backend cuda: Transformer Engine cannot be loaded. Install a version of"
            f" transformer-engine[pytorch] that was built for torch {torch.__version__} and its CUDA"
            " libraries",
            [f"{type(error).__name__}: {error}"],
        ) from error


def disable_pointwise_autotuning() -> None:
    """Make torch.compile give each pointwise kernel its first block size, instead of timing several sizes.

    Before each timing, Inductor restores what the kernel overwrites from a copy on the host. For the logits
    of 8,192 tokens (4.6 GiB in fp32), the timings took 13 s of a run's first step (torch 2.11, H100).
    """
    from torch._inductor import config

    config.triton.autotune_pointwise = False


def find_packaged_cudnn_libraries(search_path: Iterable[str]) -> list[Path]:
    """Return the cuDNN libraries of torch's own package below `search_path`; [] if torch uses the system's.

    Transformer Engine prefers a cuDNN of the system to the one that torch has loaded. Its parts load one
    another, so that one process gets two releases. Linear layers then work and every fused attention fails
    with CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED (cuDNN 9.14 beside 9.19, on an H100). The library that is
    loaded first is found first; LD_LIBRARY_PATH does not help.
    """
    return sorted(file for root in search_path for file in Path(root, "cudnn/lib").glob("libcudnn*.so.9"))


def _find_search_path(package: str) -> list[str]:
    spec = importlib.util.find_spec(package)
    return list(spec.submodule_search_locations or ()) if spec else []
