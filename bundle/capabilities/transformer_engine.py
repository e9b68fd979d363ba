"""Layers and attention kernels of Transformer Engine: cuda has them, the cpu refuses what they refuse."""

from bundle.capabilities.capabilities import AttentionKernel, LayerTraits

TRANSFORMER_ENGINE = LayerTraits(
    fused_norms=True,
    grouped_experts=True,
    fused_kernels=True,
    fused_loss=True,
    adam_counters=False,
    source="Transformer Engine's layers and FusedAdam, bias_activation_fusion; measured on an H200, 2.14.1",
)
FLASH = AttentionKernel(
    name="flash",
    what="flash-attention 2, through Transformer Engine",
    head_dims={"thd": "equal", "bshd": "any"},
    max_head_dim=256,
    source="flash-attention's README (up to 256); Megatron-LM#3003, TransformerEngine#2629 (thd: one size)",
)
FUSED = AttentionKernel(
    name="fused",
    what="cuDNN's attention, through Transformer Engine",
    head_dims={"thd": "any", "bshd": "any"},
    max_head_dim=256,
    source="run on an H200, thd: 192/128, 96/64, 256/256; 576/512 is given to the unfused kernel instead",
)
UNFUSED = AttentionKernel(
    name="unfused",
    what="matrix products and a softmax, through Transformer Engine",
    head_dims={"thd": "any", "bshd": "any"},
    masks=("causal", "padding_causal", "padding", "no_mask", "arbitrary"),
    dtypes=("bf16", "fp32"),
    context_parallel=False,
    source="Transformer Engine's UnfusedDotProductAttention: alone of the three it takes arbitrary masks, and"
    " alone it knows no context parallelism",
)
