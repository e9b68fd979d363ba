"""What this machine is and what is installed on it: by files, tools and metadata; nothing is imported."""

BACKENDS = ("cpu", "cuda", "ascend")
