"""FP8 by emulation: linear layers whose matrix products take what 8-bit numbers hold, as on a GPU."""
