"""Conversion of a micro-batch's sequences to the tensors that a model takes on one rank, and back."""
