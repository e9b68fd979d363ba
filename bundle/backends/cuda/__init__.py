"""The cuda backend: megatron-core with Transformer Engine over NCCL."""
