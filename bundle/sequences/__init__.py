"""Sequences: `alignment` decides every padding on ints, `packing` carries it out on tensors."""
