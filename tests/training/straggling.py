"""A rank that is slow in the reports that its words name, if it is rank 1; prints what is told of it."""

import sys

import torch
import torch.distributed as dist

from bundle.launch import outcomes
from bundle.runs.stragglers import Stragglers
from tests.world import join

if __name__ == "__main__":
    rank = join()
    outcomes.record_notice = lambda what: print(what, flush=True)  # type: ignore[assignment]
    one = Stragglers(0, torch.device("cpu"))
    for step in range(1, 7):
        slow = rank == 1 and str(step) in sys.argv[1:]
        print(dict(one.measure(step, 0.5 if slow else 0.125)), flush=True)
    dist.destroy_process_group()
