"""The container images: what is in them, their locks and digests. `python -m tools.images --help`."""
