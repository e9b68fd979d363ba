"""What the cpu backend offers: every layout over gloo, with the refusals of Transformer Engine's kernels."""

from dataclasses import replace

from bundle.backends.attention import FLASH, FUSED, UNFUSED
from bundle.backends.capabilities import Capabilities, Choice, Fp8Scaling, Mask, Variable, connections
from bundle.backends.layers import LOCAL
from bundle.fp8 import FORMATS, SCALINGS

_RUNS = "torch's cpu kernels, with the refusals of {}"
_EMULATED = "Transformer Engine's recipe in torch's own 8-bit numbers, with the refusals of its layers"

CPU = Capabilities(
    backend="cpu",
    device="cpu",
    collectives="gloo",
    layers=LOCAL,
    kernels=tuple(
        replace(kernel, what=_RUNS.format(kernel.what), dtypes=("bf16", "fp32"), context_parallel=True)
        for kernel in (FLASH, FUSED, UNFUSED)
    ),
    auto_attention=Choice("unfused", "the contract that takes everything: here all three cost the same"),
    fp8=tuple(Fp8Scaling(name, FORMATS, "any cpu", lambda generation: True, _EMULATED) for name in SCALINGS),
    masks=(
        Mask("text", "thd", "none", "the boundaries of the sequences say everything"),
        Mask("text", "bshd", "none", "padding stands at the end, where a causal mask hides it"),
        Mask("vlm", "thd", "valid", "the model looks for its image tokens in it and packs by itself"),
        Mask("vlm", "bshd", "valid", "the model looks for its image tokens in it"),
    ),
    environment=(
        Variable(
            "CUDA_VISIBLE_DEVICES", "", "hides GPUs: torch must see none under the facade on torch.cuda"
        ),
        Variable(
            "TORCH_DEVICE_BACKEND_AUTOLOAD",
            "0",
            "an installed torch-npu must not be loaded: without CANN it makes `import torch` itself fail",
        ),
        connections("megatron warns at every layer without it when sequence parallelism is on"),
    ),
)
