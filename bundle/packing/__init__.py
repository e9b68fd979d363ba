"""Sequences of a micro-batch as the tensors that a model takes on one rank, and the way back."""
