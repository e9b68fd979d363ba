"""Pre-training and SFT: data, the loop, checkpoints, metrics."""
