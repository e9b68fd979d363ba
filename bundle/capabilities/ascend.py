"""The ascend backend: torch-npu's operators in megatron's local layers, and HCCL. It never ran on an NPU."""

from collections.abc import Mapping

from bundle.capabilities import (
    CONNECTIONS_VARIABLE,
    AttentionKernel,
    Capabilities,
    DeviceOperator,
    EmulatedTestDevice,
    EnvVariable,
    Fp8Scaling,
    KernelChoice,
    LayerTraits,
    ModelInputMask,
    SchedulerResource,
    VariableConflict,
)
from bundle.fp8 import FORMAT_NAMES, SCALINGS

_RESOURCE_NAME_SOURCE = (
    "MindCluster's ascend-device-plugin, with one name for A1, A2 and A3; a cluster names its own gres"
)


def _is_event_timeout_too_short(environment: Mapping[str, str]) -> bool:
    event, execution = (environment.get(f"HCCL_{phase}_TIMEOUT", "") for phase in ("EVENT", "EXEC"))
    return event.isdigit() and execution.isdigit() and 0 < int(event) <= int(execution)


ASCEND = Capabilities(
    backend="ascend",
    device="npu",
    collectives="hccl",
    has_delta_nets=False,
    layers=LayerTraits(
        fused_norms=False,
        grouped_experts=False,
        fused_kernels=True,
        fused_loss=False,
        adam_counters=True,
        typed_adam=False,
        plain_sgd=True,
        source="megatron-core's local layers, torch.optim.AdamW; the memory that torch-npu's kernels keep was"
        " not measured, for lack of a device",
    ),
    kernels=(
        AttentionKernel(
            name="flash",
            implementation="npu_fusion_attention",
            head_dims={"thd": "v<=qk", "bshd": "v<=qk"},
            max_head_dim=768,
            masks=("causal", "padding_causal", "padding", "no_mask", "arbitrary"),
            dtypes=("bf16", "fp32"),
            most_sequences=2048,
            source="op-plugin: npu_fusion_attention supports Dq = Dk >= Dv up to 768, masks [b, 1, s, s] but"
            " not [b, s], 2K sequences in a pack",
        ),
        AttentionKernel(
            name="unfused",
            implementation="megatron's own DotProductAttention",
            layouts=("bshd",),
            head_dims={"bshd": "equal"},
            masks=("causal", "padding", "no_mask", "arbitrary"),
            dtypes=("bf16", "fp32"),
            context_parallel=False,
            source="megatron.core.transformer.dot_product_attention supports one head dim, cp 1, no packs",
        ),
    ),
    auto_attention=KernelChoice("flash", "the only kernel that supports packs"),
    operators=(
        DeviceOperator(
            "rms_norm", "npu_rms_norm", "one kernel; backward needs its input and one number per row"
        ),
        DeviceOperator("swiglu", "npu_swiglu", "one kernel; backward needs only its input"),
        DeviceOperator("rotary", "npu_rotary_mul", "one kernel per rotation; backward needs its input"),
        DeviceOperator(
            "permute",
            "npu_moe_token_permute_with_routing_map",
            "one kernel sends tokens to their experts, one returns them; the host does not read the order",
            frozenset({"moe"}),
        ),
        DeviceOperator(
            "grouped_experts",
            "npu_grouped_matmul",
            "one product for all experts of a rank, instead of one product per expert",
            frozenset({"moe"}),
            excluded_features=frozenset({"lora"}),
        ),
        DeviceOperator(
            "adamw",
            "_fused_adamw_",
            "one kernel per tensor update, where torch uses a dozen",
            frozenset({"adam"}),
            excluded_features=frozenset({"optimizer-cpu-offload"}),
        ),
    ),
    fp8=(),
    no_fp8_reason=(
        "supports FP8 only on Atlas A5 (Ascend950), and only with MindSpeed's layers (set"
        " backend_options.mindspeed). A2 and A3 cannot multiply 8-bit floats"
    ),
    masks=(
        ModelInputMask("text", "thd", "none", "the ends of the sequences replace it"),
        ModelInputMask(
            "text",
            "bshd",
            "none",
            "padding stands at the end, where one compressed causal mask hides it; [b, 1, s, s] would take"
            " b s² bytes, and the kernel refuses [b, s]",
        ),
        ModelInputMask(
            "vlm",
            "thd",
            "valid",
            "the model finds its image tokens in it and packs by itself; it must not reach the kernel",
        ),
        ModelInputMask(
            "vlm",
            "bshd",
            "none",
            "the model would pass it to the kernel, which does not take [b, s]; padding stands at the end",
        ),
    ),
    emulated_device=EmulatedTestDevice("torch-npu", "NPU", "kernels, HCCL, memory and speed"),
    resources=(
        SchedulerResource("huawei.com/Ascend910", "gres=npu:{}", "NPU", _RESOURCE_NAME_SOURCE),
        SchedulerResource("huawei.com/npu", "gres=npu:{}", "NPU", _RESOURCE_NAME_SOURCE, frozenset({"a5"})),
    ),
    environment=(
        EnvVariable(CONNECTIONS_VARIABLE, "1", "megatron's own check, which MindSpeed does not replace"),
        EnvVariable(
            "HCCL_CONNECT_TIMEOUT",
            "1800",
            "seconds until all ranks have connected; 120 is too short for a cold cluster",
        ),
        EnvVariable(
            "HCCL_EXEC_TIMEOUT",
            "3600",
            "seconds that one collective may wait for a rank that writes a checkpoint",
        ),
        EnvVariable("HCCL_EVENT_TIMEOUT", "3660", "must be above HCCL_EXEC_TIMEOUT, where that is set"),
        EnvVariable(
            "HCCL_DETERMINISTIC",
            "true",
            "sums between NPUs in a fixed order, as MindSpeed sets it",
            frozenset({"deterministic"}),
        ),
        EnvVariable(
            "CLOSE_MATMUL_K_SHIFT",
            "1",
            "products add in a fixed order, as MindSpeed sets it",
            frozenset({"deterministic"}),
        ),
        EnvVariable("CPU_AFFINITY_CONF", "1", "binds every rank to the cores of its device's NUMA node"),
        EnvVariable(
            "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
            "1",
            "keeps Ray from renumbering the devices of our ranks",
            frozenset({"rl"}),
        ),
    ),
    conflicts=(
        VariableConflict(
            _is_event_timeout_too_short,
            "HCCL_EVENT_TIMEOUT must be above HCCL_EXEC_TIMEOUT, because an event may wait as long as a"
            " collective. Raise HCCL_EVENT_TIMEOUT",
        ),
        VariableConflict(
            lambda e: e.get("ASCEND_LAUNCH_BLOCKING") == "1" and e.get("TASK_QUEUE_ENABLE", "0") != "0",
            "ASCEND_LAUNCH_BLOCKING=1 disables TASK_QUEUE_ENABLE. Leave one of them out",
        ),
        VariableConflict(
            lambda e: "PYTORCH_ALLOC_CONF" in e and "PYTORCH_NPU_ALLOC_CONF" in e,
            "torch-npu 26.2 and later aborts if both PYTORCH_ALLOC_CONF and PYTORCH_NPU_ALLOC_CONF are set."
            " Leave one of them out",
        ),
    ),
)

# The same devices where MindSpeed has put its layers under the names of Transformer Engine's.
ASCEND_WITH_MINDSPEED = ASCEND._replace(
    layers=LayerTraits(
        fused_norms=True,
        grouped_experts=True,
        fused_kernels=True,
        fused_loss=False,
        adam_counters=False,
        typed_adam=False,
        plain_sgd=True,
        source="MindSpeed's layers and AdamW; their memory was not measured, for lack of a device",
    ),
    # MindSpeed's norms, experts and AdamW have no alternatives.
    operators=tuple(
        operator for operator in ASCEND.operators if operator.name in ("swiglu", "rotary", "permute")
    ),
    fp8=tuple(
        Fp8Scaling(
            scaling,
            FORMAT_NAMES,
            "Atlas A5 (Ascend950)",
            lambda generation: generation == "a5",
            "A2 and A3 cannot multiply 8-bit floats, and MindSpeed itself does not refuse them",
        )
        for scaling in SCALINGS
    ),
)

_MEGATRON_ROPE_MODULE = "megatron.core.models.common.embeddings.rope_utils"
_MOE_UTILS_MODULE = "megatron.core.transformer.moe.moe_utils"

# Replacements besides those of torch-npu's transfer_to_npu, as "module:attribute", and why. Names in torch
# are replaced before megatron is imported.
REPLACEMENT_REASON_BY_TORCH_NAME = {
    "torch:compile": "megatron's jit_fuser: transfer_to_npu breaks inductor (torch 2.13: get_gpu_type has no"
    " cache_clear); megatron's functions run eagerly, everybody else's are compiled",
    "torch:Tensor.type": "megatron's optimizers compare it with torch.cuda.FloatTensor: transfer_to_npu"
    " leaves torch.npu.FloatTensor",
    "torch:cuda.get_device_capability": "torch 2.13's broadcast subscripts it where tensors are called"
    " CUDA's, and torch.npu has none",
    "megatron.core.fusions.fused_bias_swiglu:swiglu": "npu_swiglu, where model.operators has swiglu: every"
    " fused gate comes to it",
    "megatron.core.fusions.fused_bias_swiglu:swiglu_back": "its gradient: npu_swiglu_backward",
    f"{_MEGATRON_ROPE_MODULE}:_apply_rotary_pos_emb_bshd": "npu_rotary_mul, where model.operators has rotary:"
    " every rotation that no kernel of Transformer Engine's computes comes to it",
    f"{_MOE_UTILS_MODULE}:HAVE_TE": "megatron asks it before it calls the next five, which are Transformer"
    " Engine's or nobody's",
    f"{_MOE_UTILS_MODULE}:fused_permute": "npu_moe_token_permute_with_routing_map, where model.operators has"
    " permute",
    f"{_MOE_UTILS_MODULE}:fused_permute_with_probs": "the same, with the router's weights",
    f"{_MOE_UTILS_MODULE}:fused_unpermute": "npu_moe_token_unpermute_with_routing_map",
    f"{_MOE_UTILS_MODULE}:fused_sort_chunks_by_index": "rows of all ranks put in the order of the experts, by"
    " index: torch-npu has no operator for it",
    f"{_MOE_UTILS_MODULE}:fused_sort_chunks_by_index_with_probs": "the same, with the router's weights",
}

# The replacements that stay beside MindSpeed's. Of those in torch it is get_device_capability, which
# core_r0.15.3 has without the argument `device` that torch 2.13 passes.
FACADE_TARGETS_WITH_MINDSPEED = tuple(
    target
    for target in REPLACEMENT_REASON_BY_TORCH_NAME
    if target not in ("torch:compile", "torch:Tensor.type")
)

# Functions that MindSpeed replaces on every machine and that are restored, by the names that it registers.
RESTORED_FUNCTIONS = {
    f"{_MEGATRON_ROPE_MODULE}.apply_rotary_pos_emb": "loses the group of context-parallel ranks, without"
    " which 0.15 turns no pack",
    f"{_MEGATRON_ROPE_MODULE}._apply_rotary_pos_emb_bshd": "its kernel is C++ to be compiled on the machine;"
    " ours is torch-npu's",
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.load_state_dict": "does not know the form"
    " that checkpoints have from 0.15 on",
}
