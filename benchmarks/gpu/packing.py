"""What packing costs on a GPU: how often the host waits for the device in a step, and the time of a token.

python -m torch.distributed.run --nproc-per-node 1 -m benchmarks.gpu.packing [--where] [--set KEY=VALUE...]

One engine (latent attention, experts, MTP) runs the same tokens as rows, and as packs of 4 and 64 sequences.
Waits are counted by the profiler, over sequences of uneven lengths; times are those of sequences of equal
length, whose attention does the same work, in pairs one after the other. Ends with 1 where a packed step
waits more often than one of rows or takes over 3 % more time. `--where` names the lines that wait, and
the kernels that differ most: of what another kernel does in rows there are two.
"""

import argparse
import random
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.rank import grouped, prepared
from bundle.planning import build_plan
from bundle.recipe import load

RECIPE = str(Path(__file__).parent / "latent.yaml")
TOKENS, SEQUENCES, MICRO_BATCHES = 16384, (4, 64), 2
STEPS, PAIRS, LIMIT = 4, 10, 0.03
PACKED = (
    "data.packed=true",
    f"data.sequence_length={TOKENS}",
    f"model.config.max_position_embeddings={TOKENS}",
    "train.micro_batch_size=1",
)
# What the profiler calls a read of one number, and a wait for the device.
WAITS = ("aten::item", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


class Steps:
    """Steps of one engine on drawn tokens, as rows or as packs."""

    def __init__(self, recipe: Any, runtime: Any, state: Any, device: torch.device) -> None:
        from bundle.engine import Engine

        self.recipe, self.device = recipe, device
        self.engine = Engine(recipe, runtime, state, device)

    def micro_batches(self, lengths: Sequence[int], *, packed: bool) -> list[Any]:
        """A step's micro-batches of sequences with these lengths; rows have all the same."""
        from bundle.engine.microbatch import from_packing, from_rows
        from bundle.packing.packing import Packing
        from bundle.recipe.alignment import Alignment

        size, depths = self.recipe.architecture.vocab_size, self.recipe.architecture.mtp_layers
        made = []
        for _ in range(MICRO_BATCHES):
            drawn = (*(torch.randint(0, size, (sum(lengths),)) for _ in range(2)), torch.ones(sum(lengths)))
            ids, labels, mask = (x.to(self.device) for x in drawn)
            if packed:
                packing = Packing.from_lengths(lengths, Alignment("thd"), device=self.device)
                made.append(from_packing(ids, labels, mask, packing, mtp_layers=depths))
            else:
                rows = (x.view(len(lengths), -1) for x in (ids, labels, mask))
                made.append(from_rows(*rows, cp=1, rank=0, mtp_layers=depths))
        return made

    def run(self, lengths: Sequence[int], *, packed: bool) -> None:
        """One step; its micro-batches are made anew of what lies on the host, as training makes them."""
        self.engine.forward_backward(self.micro_batches(lengths, packed=packed))
        self.engine.step_optimizer()

    def waits(self, lengths: Sequence[int], *, packed: bool) -> Counter[str]:
        """How often the host waits in one step, by the profiler's names."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.run(lengths, packed=packed)
        with torch.profiler.profile(activities=activities) as profile:
            self.run(lengths, packed=packed)
        return Counter({event.key: event.count for event in profile.key_averages() if event.key in WAITS})

    def kernels(self, lengths: Sequence[int], *, packed: bool) -> Counter[str]:
        """The milliseconds of each kernel in one step, by name."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.run(lengths, packed=packed)
        totals: Counter[str] = Counter()
        for event in profile.key_averages():
            totals[event.key] += event.self_device_time_total / 1000
        return totals

    def milliseconds(self, lengths: Sequence[int], *, packed: bool, steps: int = STEPS) -> float:
        """The time of a step, on average of a few."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(steps):
            self.run(lengths, packed=packed)
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / steps


def uneven(count: int) -> list[int]:
    """`count` lengths, none like another's by rule, `TOKENS` in all."""
    cuts = sorted(random.Random(count).sample(range(1, TOKENS), count - 1))
    return [b - a for a, b in pairwise((0, *cuts, TOKENS))]


@contextmanager
def waiting_lines() -> Iterator[Counter[str]]:
    """The lines of Python below which the host waits for the device, and how often."""
    seen: Counter[str] = Counter()

    def told(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA" in str(message):
            frames = [f for f in traceback.extract_stack() if "torch/" not in f.filename][:-1]
            seen[" < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames[:-4:-1])] += 1

    before, warnings.showwarning = warnings.showwarning, told
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = told
            yield seen
    finally:
        torch.cuda.set_sync_debug_mode("default")
        warnings.showwarning = before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", nargs="*", default=[], help="changes of the recipe")
    parser.add_argument("--where", action="store_true", help="name the lines that wait")
    options = parser.parse_args()
    recipe = load(RECIPE, (*PACKED, *options.set))
    plan = build_plan(recipe, per_node=1)
    with prepared(plan) as (runtime, device, _):
        steps, wrong = Steps(recipe, runtime, grouped(recipe, runtime), device), 0
        rows = steps.waits([TOKENS // 4] * 4, packed=False)
        print(f"rows: {dict(rows)}", flush=True)
        for count in SEQUENCES:
            waits = steps.waits(uneven(count), packed=True)
            wrong += any(waits[name] > rows[name] for name in WAITS)
            print(f"packs of {count}: {dict(waits)}", flush=True)
        if device.type != "cuda":
            return 1 if wrong else 0
        if options.where:
            for name, lengths, packed in (("rows", [TOKENS // 4] * 4, False), ("packs", uneven(64), True)):
                with waiting_lines() as lines:
                    steps.run(lengths, packed=packed)
                print(f"{name}:", *(f"  {n:5d} {line}" for line, n in lines.most_common(12)), sep="\n")
            longer = steps.kernels([TOKENS // 4] * 4, packed=True)
            longer.subtract(steps.kernels([TOKENS // 4] * 4, packed=False))
            most = sorted(longer.items(), key=lambda of: -abs(of[1]))[:16]
            print(f"kernels, ms longer in packs, {sum(longer.values()):.2f} in all:")
            print(*(f"  {ms:7.2f} {name}" for name, ms in most), sep="\n")
        for count in SEQUENCES:
            lengths = [TOKENS // count] * count
            pairs = [
                [steps.milliseconds(lengths, packed=packed) for packed in (True, False)]
                for _ in range(PAIRS + 1)
            ][1:]
            ratios = [packed / rows for packed, rows in pairs]
            wrong += median(ratios) > 1 + LIMIT
            print(f"time of packs of {count} against rows: {median(ratios):.3f}; ms of a step:", end=" ")
            print(*(f"{packed:.0f}/{rows:.0f}" for packed, rows in pairs), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
