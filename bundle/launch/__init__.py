"""Who started us, what starts the ranks of this node, and how they ended."""
