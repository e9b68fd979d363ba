"""The patches, one module for each area of megatron-core; each holds a tuple named PATCHES."""
