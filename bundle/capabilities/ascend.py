"""What the ascend backend offers: npu_fusion_attention, MindSpeed's FP8 on Atlas A5, HCCL. Read, not run."""

from bundle.capabilities import (
    AttentionKernel,
    Capabilities,
    Choice,
    Fp8Scaling,
    Mask,
    Variable,
    connections,
)
from bundle.capabilities.cuda import TRANSFORMER_ENGINE
from bundle.fp8 import FORMATS, SCALINGS

_NOTES = "MindSpeed 26.1.0 release notes; op-plugin has int8 and int4 products only on A2 and A3"


ASCEND = Capabilities(
    backend="ascend",
    device="npu",
    collectives="hccl",
    layers=TRANSFORMER_ENGINE._replace(source="MindSpeed follows the same specs; not measured: no device"),
    kernels=(
        AttentionKernel(
            name="flash",
            what="npu_fusion_attention",
            head_dims={"thd": "v<=qk", "bshd": "v<=qk"},
            max_head_dim=768,
            masks=("causal", "padding_causal", "padding", "no_mask", "arbitrary"),
            dtypes=("bf16", "fp32"),
            context_parallel=False,
            source="op-plugin: npu_fusion_attention takes Dq = Dk >= Dv up to 768, masks [b, 1, s, s] and no"
            " [b, s]; context parallelism over it is MindSpeed's, which is not wired in",
        ),
        AttentionKernel(
            name="unfused",
            what="megatron's own DotProductAttention",
            layouts=("bshd",),
            head_dims={"bshd": "equal"},
            masks=("causal", "padding", "no_mask", "arbitrary"),
            dtypes=("bf16", "fp32"),
            context_parallel=False,
            source="megatron.core.transformer.dot_product_attention takes one head dim, cp 1, nothing packed",
        ),
    ),
    auto_attention=Choice("flash", "the only kernel for packed input"),
    fp8=tuple(
        Fp8Scaling(name, FORMATS, "Atlas A5 (Ascend950)", lambda generation: generation == "a5", _NOTES)
        for name in SCALINGS
    ),
    masks=(
        Mask("text", "thd", "none", "the ends of the sequences say everything"),
        Mask(
            "text",
            "bshd",
            "none",
            "padding stands at the end, where one compressed causal mask hides it: [b, 1, s, s] would be b s²"
            " bytes, and [b, s] is refused",
        ),
        Mask(
            "vlm",
            "thd",
            "valid",
            "the model looks for its image tokens in it and packs by itself; it must not reach the kernel",
        ),
        Mask(
            "vlm",
            "bshd",
            "none",
            "the model would hand it on to the kernel, which takes no [b, s]; padding stands at the end",
        ),
    ),
    refusal=(
        "backend ascend: training is not wired in yet. Its core attention is written, and tested over an"
        " emulated npu_fusion_attention; layers, devices and HCCL have met no NPU. `mcore-bundle plan` and"
        " `patches plan` answer for ascend; `backend: cpu` trains"
    ),
    environment=(
        connections("megatron's own check, which MindSpeed keeps"),
        Variable(
            "HCCL_CONNECT_TIMEOUT",
            "1800",
            "seconds until all ranks are there; 120 is short for a cold cluster",
        ),
        Variable(
            "HCCL_EXEC_TIMEOUT",
            "3600",
            "seconds that one collective may wait for a rank that writes a checkpoint",
        ),
        Variable("HCCL_EVENT_TIMEOUT", "3660", "must be above HCCL_EXEC_TIMEOUT where that is set"),
        Variable("CPU_AFFINITY_CONF", "1", "binds every rank to the cores of its device's NUMA node"),
        Variable(
            "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
            "1",
            "Ray would renumber the devices under our ranks",
            frozenset({"rl"}),
        ),
    ),
)
