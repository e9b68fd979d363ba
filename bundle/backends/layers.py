"""What a backend builds its layers from, as far as tensors and memory depend on it."""

from bundle.frozen import frozen_by_name


@frozen_by_name
class Layers:
    """The family of layers and of the optimizer."""

    fused_norms: bool  # the norm before a projection is part of that projection
    grouped_experts: bool  # one module for the first matrices of all local experts, one for the second
    fused_kernels: bool  # norms, the gate and attention keep only what their own backward kernel reads
    fused_loss: (
        bool  # the loss as one kernel: it makes an fp32 copy of the logits, where torch works in place
    )
    adam_counters: bool  # the optimizer keeps a step count with every tensor
    source: str


LOCAL = Layers(
    fused_norms=False,
    grouped_experts=False,
    fused_kernels=False,
    fused_loss=False,
    adam_counters=True,
    source="megatron-core's local layers on torch's own kernels; torch.optim.AdamW",
)
TRANSFORMER_ENGINE = Layers(
    fused_norms=True,
    grouped_experts=True,
    fused_kernels=True,
    fused_loss=True,
    adam_counters=False,
    source="Transformer Engine's layers and FusedAdam, bias_activation_fusion; measured on an H200, 2.14.1",
)
