"""Known traps: defects of megatron-core that no narrow patch mends; recipes that meet one are refused."""

from bundle.patches.entry import Trap

TRAPS = (
    Trap(
        id="moe-tensor-without-expert-parallel",
        range="<0.19",
        when=frozenset({"moe", "tp"}),
        unless=frozenset({"ep", "etp"}),
        why="The experts' gradients are not summed over the tensor-parallel ranks: silently wrong.",
        cause=(
            "tensor_parallel/layers.py marks expert weights `allreduce = not (is_expert and EP > 1)`, "
            "without regard to ETP != TP; mended by #5916 in 0.19.0 (use_expert_pgs)"
        ),
        instead="Set parallel.etp to parallel.tp, or parallel.ep above 1.",
    ),
    Trap(
        id="mtp-packed",
        range="<0.16",
        when=frozenset({"mtp", "packed"}),
        why="Multi-token prediction refuses packed sequences.",
        cause="MultiTokenPredictionLayer.forward asserts packed_seq_params is None; lifted in 0.16.0",
        instead="Set data.packed to false, or use megatron-core 0.16 or later.",
    ),
    Trap(
        id="mtp-tensor-parallel",
        range="<0.13",
        when=frozenset({"mtp", "tp"}),
        why="The gradients of multi-token prediction are reduced once too often over tensor-parallel ranks.",
        cause=(
            "MultiTokenPredictionLayer.forward gathers with all_gather_last_dim_from_tensor_parallel_region, "
            "whose backward reduces; 0.13.0 uses gather_from_tensor_model_parallel_region"
        ),
        instead="Set parallel.tp to 1, or use megatron-core 0.13 or later.",
    ),
    Trap(
        id="interleaved-batched-exchange",
        range="",
        when=frozenset({"vpp", "batched-exchange"}),
        why="With two stages, activations and gradients of interleaved chunks are swapped: silently wrong.",
        cause=(
            "previous and next stage are the same rank and the messages have one shape: a backend that "
            "matches batched messages by order confuses them (measured on gloo in 0.12 and 0.16)"
        ),
        instead="Use overlap_p2p_comm without batch_p2p_comm.",
    ),
    Trap(
        id="overlap-tied-mtp",
        range="<0.16",
        when=frozenset({"overlap-grad-reduce", "mtp", "tied-embeddings", "pp"}),
        why="The last stage holds an output weight that nothing uses and its bucket is never sent: a hang.",
        cause="LanguageModule allocates output_layer.weight there although it is tied; measured to 0.15",
        instead="Set distributed.overlap_grad_reduce to false, or use megatron-core 0.16 or later.",
    ),
)
