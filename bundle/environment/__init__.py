"""Facts about this machine and its packages, read from files, tools and metadata; nothing is imported."""

BACKENDS = ("cpu", "cuda", "ascend")

# More than any machine has, and small enough that a typing error is refused.
MOST_RANKS = 2**20
MOST_RANKS_PER_NODE = 1024
