"""The cpu backend: every layout over gloo, with the refusals of Transformer Engine's kernels."""

from bundle.capabilities import (
    CONNECTIONS_VARIABLE,
    Capabilities,
    EnvVariable,
    Fp8Scaling,
    KernelChoice,
    LayerTraits,
)
from bundle.capabilities.cuda import CUDA, FLASH_ATTENTION, FUSED_ATTENTION_KERNEL, UNFUSED_ATTENTION
from bundle.fp8 import FORMAT_NAMES, SCALINGS

_KERNEL_IMPLEMENTATION_TEMPLATE = "torch's cpu kernels, with the refusals of {}"
_FP8_SOURCE = "Transformer Engine's recipe in torch's own 8-bit numbers, with the refusals of its layers"

LOCAL_LAYER_TRAITS = LayerTraits(
    fused_norms=False,
    grouped_experts=False,
    fused_kernels=False,
    fused_loss=False,
    adam_counters=True,
    typed_adam=False,
    plain_sgd=True,
    source="megatron-core's local layers on torch's own kernels; torch.optim.AdamW",
)

CPU = Capabilities(
    backend="cpu",
    device="cpu",
    collectives="gloo",
    thread_limit=1,
    layers=LOCAL_LAYER_TRAITS,
    kernels=tuple(
        kernel._replace(
            implementation=_KERNEL_IMPLEMENTATION_TEMPLATE.format(kernel.implementation),
            dtypes=("bf16", "fp32"),
            context_parallel=True,
            explain_device_refusal=None,
        )
        for kernel in (
            FLASH_ATTENTION,
            FUSED_ATTENTION_KERNEL,
            UNFUSED_ATTENTION._replace(sinks=("bshd", "thd", "cp")),
        )
    ),
    auto_attention=KernelChoice(
        "unfused", "supports every layout; on the CPU all three kernels cost the same"
    ),
    fp8=tuple(
        Fp8Scaling(name, FORMAT_NAMES, "any cpu", lambda generation: True, _FP8_SOURCE) for name in SCALINGS
    ),
    masks=CUDA.masks,  # a model is given what it is given there
    environment=(
        EnvVariable(
            "CUDA_VISIBLE_DEVICES", "", "hides GPUs: under the facade on torch.cuda, torch must see none"
        ),
        EnvVariable(
            "TORCH_DEVICE_BACKEND_AUTOLOAD",
            "0",
            "prevents loading an installed torch-npu: without CANN it makes `import torch` fail",
        ),
        EnvVariable(
            CONNECTIONS_VARIABLE,
            "1",
            "prevents a warning at every layer under sequence parallelism",
        ),
    ),
)

# The facade's replacements, as "module:attribute", and why: names that training steps and checkpoints of
# megatron-core 0.12 .. 0.19 use and that fail or answer wrongly without a GPU. All other names are correct.
REPLACEMENT_REASON_BY_TORCH_NAME = {
    "torch.cuda:current_device": "every buffer and every random state is placed on it: it is the cpu",
    "torch.cuda:device": "tensor_parallel.random enters it to seed a device",
    "torch.cuda:synchronize": "timers, dispatchers and checkpoints wait for the device: cpu work is done",
    "torch.cuda:Stream": "DDP, dispatchers and offloading create side streams: there is one order here",
    "torch.cuda:Event": "overlap and timers record events: nothing is pending on a cpu",
    "torch.cuda:current_stream": "p2p and dispatchers wait on it: there is one order here",
    "torch.cuda:stream": "overlap code runs inside a stream's context: there is one order here",
    "torch.cuda:default_generators": "tensor_parallel.random takes the device's generator: it is the cpu's",
    "torch.cuda:manual_seed": "the random tracker seeds its streams through it; torch would only queue it",
    "torch.cuda:get_rng_state": "the random tracker and recomputation save it: it is the cpu's",
    "torch.cuda:set_rng_state": "the random tracker and recomputation restore it: it is the cpu's",
    "torch.cuda.random:get_rng_state": "tensor_parallel.random reads it by this name: it is the cpu's",
    "torch.cuda:_lazy_call": "tensor_parallel.random defers seeding until CUDA starts: here it is at once",
    "torch.cuda:_lazy_init": "imported by tensor_parallel.random: there is no CUDA to start",
    "torch.autograd:_engine_run_backward": "hooks and recomputation during backward are megatron's calls too",
    "torch.distributed:all_gather": "tensor-parallel experts gather parts of unequal rows: gloo does not",
    "torch.distributed:reduce_scatter": "tensor-parallel experts return them: gloo does not",
    "torch:compile": "megatron's jit_fuser: its functions run eagerly, everybody else's are compiled",
}
