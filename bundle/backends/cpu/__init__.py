"""The cpu backend: the real megatron-core over gloo, with the refusals of an accelerator."""
