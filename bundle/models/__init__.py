"""Builds the models that train: GPT chunks of this rank, named and filled alike in every layout."""
