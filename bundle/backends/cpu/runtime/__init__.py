"""The cpu runtime. `facade` comes first, before megatron is imported; the other modules import megatron."""
