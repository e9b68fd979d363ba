"""What the cuda backend does on a real GPU: the losses it gives beside the cpu's, and its speed.

`python -m benchmarks.gpu` runs every case on one GPU, each in processes of its own, and compares the curves.
"""
