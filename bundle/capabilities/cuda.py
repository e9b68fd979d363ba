"""The cuda backend: Transformer Engine's layers, attention kernels and FP8 scalings; NCCL."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from bundle.capabilities import (
    CONNECTIONS_VARIABLE,
    AttentionKernel,
    Capabilities,
    EnvVariable,
    Fp8Scaling,
    KernelChoice,
    KernelPreference,
    LayerTraits,
    ModelInputMask,
    Peak,
    SchedulerResource,
)
from bundle.fp8 import FORMAT_NAMES

if TYPE_CHECKING:
    from bundle.recipe import Recipe

_FP8_SUPPORT_SOURCE = "Transformer Engine's support matrix"
_PEAK_SOURCE = (
    "FLOP/s: get_peak_flops of pytorch/torchtitan (02581674), which names NVIDIA's own pages; memory: the"
    " SXM columns of comparisons of NVIDIA's data sheets"
)

TRANSFORMER_ENGINE_LAYER_TRAITS = LayerTraits(
    fused_norms=True,
    grouped_experts=True,
    fused_kernels=True,
    fused_loss=True,
    adam_counters=False,
    typed_adam=True,
    plain_sgd=False,
    fp8_copy_bytes=2,
    deterministic_workspace=64,
    source="Transformer Engine's layers and FusedAdam, bias_activation_fusion; measured on an H200, 2.14.1;"
    " FusedSGD makes a momentum_buffer of any tensor; FP8 weights stay by rows and by columns; packs of"
    " 2,048 to 8,192 tokens took 4.1 to 64.4 GiB in deterministic attention of 16 heads",
)
# Up to 256 by flash-attention's README; one size by Megatron-LM#3003 and TransformerEngine#2629.
FLASH_ATTENTION = AttentionKernel(
    name="flash",
    implementation="flash-attention 2, through Transformer Engine",
    head_dims={"thd": "equal", "bshd": "equal"},
    max_head_dim=256,
    takes_padded_packs=False,
    source="flash-attention's README; Transformer Engine's get_attention_backend, 2.11 to 2.14",
)


def _parse_dotted_capability(generation: str) -> tuple[int, ...]:
    return tuple(map(int, generation.split(".")))


def _explain_cudnn_refusal(generation: str, layout: str, width: int, value_width: int) -> str | None:
    """Return why cuDNN, through Transformer Engine, does not train with such heads on a device."""
    capability = _parse_dotted_capability(generation)
    if layout == "thd" and capability < (9, 0):
        return f"supports packs only from compute capability 9.0 on, but this device is {generation}"
    if max(width, value_width) <= 128 or capability == (9, 0):
        return None
    if capability >= (10, 0) and (width, value_width) == (192, 128):
        return None
    return (
        "trains heads above 128 only on compute capability 9.0, or from 10.0 on with keys of 192 and values"
        f" of 128. This model has heads of {width} and {value_width}, and this device is {generation}"
    )


# On an H200, thd heads of 192/128, 96/64 and 256/256 ran, while 576/512 went to the unfused kernel. Sinks by
# get_attention_backend (002a3e57, 2.11): no packs, which 2.12 supports, and cp only with a2a.
FUSED_ATTENTION_KERNEL = AttentionKernel(
    name="fused",
    implementation="cuDNN's attention, through Transformer Engine",
    head_dims={"thd": "any", "bshd": "any"},
    max_head_dim=256,
    sinks=("bshd",),
    explain_device_refusal=_explain_cudnn_refusal,
    source="runs on an H200; Transformer Engine's get_attention_backend (2.11) and fused_attn.cpp (015d346d)",
)
UNFUSED_ATTENTION = AttentionKernel(
    name="unfused",
    implementation="matrix products and a softmax, through Transformer Engine",
    head_dims={"thd": "any", "bshd": "any"},
    masks=("causal", "padding_causal", "padding", "no_mask", "arbitrary"),
    dtypes=("bf16", "fp32"),
    context_parallel=False,
    sinks=("bshd",),
    source="Transformer Engine's UnfusedDotProductAttention: the only one of the three with arbitrary masks,"
    " and the only one without context parallelism",
)


def _is_at_least(major: int, minor: int) -> Callable[[str], bool]:
    return lambda generation: _parse_dotted_capability(generation) >= (major, minor)


def _build_older_gpu_check(major: int, minor: int) -> Callable[[str], bool]:
    return lambda generation: _parse_dotted_capability(generation) < (major, minor)


_ONE_QUEUE_REASON = (
    "one hardware queue runs communication before the kernels that it overlaps; Megatron-LM's arguments.py"
    " requires it for tp and cp before compute capability 10.0"
)


def _has_narrow_packs_on_hopper(recipe: "Recipe", generation: str | None) -> bool:
    """Return whether packed values are narrower than their keys, on Hopper and with cp 1."""
    hopper = generation is not None and generation.startswith("9.")
    return hopper and recipe.parallel.cp == 1 and _has_narrow_packed_values(recipe)


def _has_narrow_packed_cp_values(recipe: "Recipe", generation: str | None) -> bool:
    return recipe.parallel.cp > 1 and _has_narrow_packed_values(recipe)


def _has_narrow_packed_values(recipe: "Recipe") -> bool:
    width, value_width = recipe.architecture.head_dims
    return recipe.data.packed and value_width < width


CUDA = Capabilities(
    backend="cuda",
    device="cuda",
    collectives="nccl",
    layers=TRANSFORMER_ENGINE_LAYER_TRAITS,
    kernels=(FLASH_ATTENTION, FUSED_ATTENTION_KERNEL, UNFUSED_ATTENTION),
    auto_attention=KernelChoice(
        "auto", "Transformer Engine chooses a kernel that supports the input, call by call"
    ),
    preferences=(
        KernelPreference(
            "fused",
            _has_narrow_packs_on_hopper,
            "supports packed values narrower than keys; with padding to one width, as other kernels need"
            " it, a step of latent attention took 11 % longer on an H200",
        ),
        KernelPreference(
            "auto",
            _has_narrow_packed_cp_values,
            "packed values narrower than keys are padded to one width; between ranks, cuDNN did not accept"
            " them unpadded",
        ),
    ),
    fp8=(
        Fp8Scaling(
            "delayed",
            FORMAT_NAMES,
            "compute capability 8.9 or newer",
            _is_at_least(8, 9),
            _FP8_SUPPORT_SOURCE,
        ),
        Fp8Scaling(
            "tensorwise",
            FORMAT_NAMES,
            "compute capability 8.9 or newer",
            _is_at_least(8, 9),
            _FP8_SUPPORT_SOURCE,
        ),
        Fp8Scaling(
            "blockwise",
            FORMAT_NAMES,
            "compute capability 9.0 or newer",
            _is_at_least(9, 0),
            _FP8_SUPPORT_SOURCE,
        ),
        Fp8Scaling(
            "mxfp8",
            FORMAT_NAMES,
            "compute capability 10.0 or 10.3",
            lambda capability: capability in ("10.0", "10.3"),
            f"{_FP8_SUPPORT_SOURCE}, which excludes 12.0; TransformerEngine#2304",
        ),
    ),
    masks=(
        ModelInputMask("text", "thd", "none", "the boundaries of the sequences replace it"),
        ModelInputMask("text", "bshd", "none", "padding stands at the end, where a causal mask hides it"),
        ModelInputMask("vlm", "thd", "valid", "the model finds its image tokens in it and packs by itself"),
        ModelInputMask("vlm", "bshd", "valid", "the model finds its image tokens in it"),
    ),
    resources=(
        SchedulerResource(
            "nvidia.com/gpu", "gpus-per-node={}", "GPU", "NVIDIA/k8s-device-plugin; sbatch(1); ray 2.60"
        ),
    ),
    peaks=(
        Peak("NVIDIA A100-SXM4-80GB", 312e12, 2.039e12, _PEAK_SOURCE),
        Peak("NVIDIA H100 80GB HBM3", 989e12, 3.35e12, _PEAK_SOURCE),
        Peak("NVIDIA H200", 989e12, 4.8e12, _PEAK_SOURCE),
        Peak("NVIDIA B200", 2.25e15, 8e12, _PEAK_SOURCE),
    ),
    environment=(
        EnvVariable(
            CONNECTIONS_VARIABLE,
            "8",
            "CUDA's own default: with 1, which Megatron-LM requires for tp and cp, a step of the experts'"
            " benchmark took 421 ms on an H200 instead of 377",
        ),
        *(
            EnvVariable(
                CONNECTIONS_VARIABLE,
                "1",
                _ONE_QUEUE_REASON,
                frozenset({axis}),
                runs_on=_build_older_gpu_check(10, 0),
            )
            for axis in ("tp", "cp")
        ),
        EnvVariable(
            "NVTE_USE_CUTLASS_GROUPED_GEMM",
            "1",
            "Transformer Engine computes the bf16 products of all experts in one launch, where their sizes"
            " allow it: with 128 experts, a step took 0.81 s on an H100 instead of 0.95 s",
            frozenset({"moe"}),
            runs_on=lambda capability: capability.startswith("9."),
        ),
        EnvVariable(
            "NCCL_CUMEM_ENABLE",
            "0",
            "must be equal on both sides of a weight sync, and SGLang sets 0; otherwise the first transfer"
            " fails on the server with 'invalid argument' and the trainer hangs",
            frozenset({"rl"}),
        ),
        EnvVariable(
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
            "0",
            "Transformer Engine takes deterministic attention alone; on an H200 its backward pass took 13 to"
            " 17 % longer",
            frozenset({"deterministic"}),
        ),
        EnvVariable(
            "CUBLAS_WORKSPACE_CONFIG",
            ":4096:8",
            "torch needs a fixed workspace of cuBLAS for deterministic products",
            frozenset({"deterministic"}),
        ),
        EnvVariable(
            "NCCL_ALGO",
            "Ring",
            "one algorithm for all sums between GPUs; Megatron-LM requires one for its deterministic mode",
            frozenset({"deterministic"}),
        ),
        EnvVariable(
            "TORCH_DEVICE_BACKEND_AUTOLOAD",
            "0",
            "prevents loading an installed torch-npu: next to CUDA it makes `import torch` fail",
        ),
    ),
)
