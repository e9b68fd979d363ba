"""As tests.rl.training, with servers that get weights in buckets of a CPU's memory. Emulated: the GPU.

python -m tests.rollouts.sglang.bucket_training DIRECTORY JSON
"""

import json
import sys
from pathlib import Path

import torch

from bundle.rollouts.sglang import building
from tests.rl import training

if __name__ == "__main__":
    torch.multiprocessing.set_sharing_strategy("file_system")
    building._find_bucket_transport_device = lambda recipe, memory: torch.device("cpu")
    training.main(Path(sys.argv[1]), json.loads(sys.argv[2]))
