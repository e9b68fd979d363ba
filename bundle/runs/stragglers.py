"""Ranks of a training run that are slower than others, reported as it happens."""

import statistics
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from bundle.launch import outcomes

# The ratio of a rank's time to the median of its stage, and the number of reports in a row.
STRAGGLER_RATIO, STRAGGLER_REPORTS = 1.5, 2


class Stragglers:
    """Compares the time that ranks of the same stage need for their own part of a step; rank 0 reports."""

    def __init__(self, stage: int, device: torch.device) -> None:
        """Gather the stages and nodes of all ranks. `stage` is this rank's pipeline stage.

        The constructor and `measure` are collectives.
        """
        self._device = device
        places: list[tuple[int, str]] = [(0, "")] * dist.get_world_size()
        dist.all_gather_object(places, (stage, outcomes.get_node_name()))
        self._stages, self._nodes = [stage for stage, _ in places], [node for _, node in places]
        self._slow: tuple[int | None, int] = (None, 0)  # the slowest rank, and in how many reports

    def measure(self, step: int, seconds: float) -> Mapping[str, float]:
        """Return the slowest rank's time, as a multiple of the median of its stage, as a metric.

        `seconds` is this rank's own time of a step. Return nothing where no two ranks can be compared.
        """
        if len(set(self._stages)) == len(self._stages):
            return {}
        own_seconds = torch.tensor([seconds], dtype=torch.float32, device=self._device)
        all_seconds = [torch.empty_like(own_seconds) for _ in self._stages]
        dist.all_gather(all_seconds, own_seconds)
        if dist.get_rank() != 0:
            return {}
        rank, ratio, usual = find_slowest_rank_ratio_median(torch.cat(all_seconds).tolist(), self._stages)
        if rank is None:
            return {}
        earlier_rank, count = self._slow
        count = 0 if ratio < STRAGGLER_RATIO else count + 1 if rank == earlier_rank else 1
        self._slow = rank, count
        if count == STRAGGLER_REPORTS:
            outcomes.record_notice(
                f"step {step}: rank {rank} on {self._nodes[rank]} straggles: {ratio:.2g} times as long as the"
                f" middle of its stage ({ratio * usual:.3g} s, {usual:.3g} s)"
            )
        return {"train/straggler_ratio": ratio}


def find_slowest_rank_ratio_median(
    seconds: Sequence[float], stages: Sequence[int]
) -> tuple[int | None, float, float]:
    """Return the rank that is slowest relative to its stage's median, the ratio, and the median [s].

    Of two ranks, the faster one is the median. The rank is None where every stage has one rank.
    """
    result: tuple[int | None, float, float] = (None, 1.0, 0.0)
    for stage in set(stages):
        ranks = [rank for rank, rank_stage in enumerate(stages) if rank_stage == stage]
        usual = statistics.median_low([seconds[rank] for rank in ranks])
        if len(ranks) == 1 or usual <= 0:
            continue
        rank = max(ranks, key=lambda candidate: seconds[candidate])
        ratio = seconds[rank] / usual
        if result[0] is None or ratio > result[1]:
            result = rank, ratio, usual
    return result
