"""The experiments: each function takes a Bench and returns a distance from a reference."""
