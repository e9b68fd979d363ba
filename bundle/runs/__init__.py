"""Runs: the directory of each run, which one process locks, and the outputs of its metrics."""
