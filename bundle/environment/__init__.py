"""What this machine is and what is installed on it: by files, tools and metadata; nothing is imported."""

BACKENDS = ("cpu", "cuda", "ascend")

# Beyond any machine, and small enough that a slip of the finger is refused rather than worked on.
MOST_RANKS = 2**20
MOST_RANKS_PER_NODE = 1024
