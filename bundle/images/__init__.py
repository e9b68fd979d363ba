"""The container images: what is in them, their locks and digests, and what an image knows about itself."""

# What an image knows about itself: `images stamp` writes it, `doctor` reads it.
RECORD = "/opt/bundle/build-info.json"
