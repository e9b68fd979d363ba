"""Runs: the directory of each, which one process holds, and where its numbers go."""
