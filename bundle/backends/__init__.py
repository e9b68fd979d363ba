"""What differs by accelerator and needs torch; what is known of each without it stands in `capabilities`."""

from bundle.backends.runtime import Runtime, prepare

__all__ = ["Runtime", "prepare"]
