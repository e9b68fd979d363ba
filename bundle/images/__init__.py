"""The container images: what is in them, their locks and digests, and what an image knows about itself."""
