"""FP8 with a scale for each block of a matrix, as DeepSeek-V3 is published: which tensors, in which words.

A tensor in FP8 has a second one behind its name, of one number per block: what to multiply the block by.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bundle.architectures.tensors import Tensor
from bundle.errors import shown

FP8 = "F8_E4M3"
SCALE = "_scale_inv"
BLOCK = (128, 128)  # rows and columns, of what is written


def is_quantized(name: str) -> bool:
    """Whether an FP8 export has this tensor of the table in FP8: the linear layers, without routers."""
    path, _, kind = name.rpartition(".")
    return path.rpartition(".")[2].startswith("linear_") and kind == "weight"


def blocks(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, int]:
    """How many blocks a matrix has, down and across; the last ones may be smaller."""
    rows, columns = (-(-size // of) for size, of in zip(shape, block, strict=True))
    return rows, columns


def described(tensors: Iterable[Tensor]) -> dict[str, Any]:
    """The `quantization_config` of a model whose tensors these are, as loaders know it."""
    apart = [
        name.removesuffix(".weight")
        for tensor in tensors
        if len(tensor.shape) == 2
        and not is_quantized(tensor.name)
        and not tensor.name.startswith("embedding.")
        for name in tensor.published
    ]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": apart,
    }


def block_of(config: Mapping[str, Any]) -> tuple[tuple[int, int] | None, list[str]]:
    """The block of a published model's scales, and what is against how its weights are quantised."""
    said = config.get("quantization_config")
    if said is None:
        return None, []
    method = said.get("quant_method") if isinstance(said, dict) else None
    if not isinstance(said, dict) or method != "fp8":
        return None, [f"quantization_config.quant_method {shown(method)}: only fp8 with blocks is read"]
    block = said.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
        return (block[0], block[1]), []
    return None, [f"quantization_config.weight_block_size {shown(block)}: must be two sizes, as [128, 128]"]
