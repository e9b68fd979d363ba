"""Packing by one plan against packing one sequence at a time: CPU time and tensor operations.

Run with `python -m benchmarks.sequences`. Both ways take the same tensors in the same run, in turns, on one
thread, and must give the same results. Every line of ours makes its plan anew (host arithmetic: in its time,
not in its operations); only the last line of a block uses one for all, as training does. Large routes
(`--layers 16 --topk 8`) are bound by copying memory.
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import process_time_ns
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import per_sequence
from bundle.packing.packing import Packing
from bundle.recipe.alignment import Alignment

ALIGNMENT = Alignment(cp=2, tp=2, sequence_parallel=True, scaling="blockwise")
SEQUENCES = (8, 64, 512)
COLUMNS = (
    f"{'sequences':>9} {'tokens':>8}  {'work':<22}{'operations':>18}{'fewer':>8}{'CPU ms':>20}{'faster':>8}"
)


class Operations(TorchDispatchMode):
    """Counts the tensor operations that run a kernel or make a view."""

    count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Inputs:
    """What one micro-batch brings; `log_probs` and `routes` as all_gather_into_tensor leaves them."""

    lengths: list[int]
    ids: Tensor  # [tokens]
    mask: Tensor  # [tokens]
    log_probs: Tensor  # [cp, t/cp]
    routes: Tensor  # [cp, t/cp, L, k]

    @classmethod
    def draw(cls, lengths: list[int], layers: int, topk: int) -> "Inputs":
        tokens, (_, rows) = sum(lengths), Packing.from_lengths(lengths, ALIGNMENT, rank=0).local_shape
        return cls(
            lengths,
            torch.randint(1, 1000, (tokens,)),
            torch.randint(0, 2, (tokens,)),
            torch.randn(ALIGNMENT.cp, rows),
            torch.randint(0, 256, (ALIGNMENT.cp, rows, layers, topk), dtype=torch.int16),
        )


def by_plan(x: Inputs) -> dict[str, Callable[[Packing], Any]]:
    """The work by a `Packing`."""
    return {
        "pack ids, positions": lambda p: (p.pack_concatenated_tokens(x.ids), p.local_positions),
        "roll labels, mask": lambda p: (
            p.pack_concatenated_tokens(x.ids, roll=1),
            p.pack_concatenated_tokens(x.mask, roll=1),
        ),
        "unpack log-probs": lambda p: p.unpack_gathered_shards(x.log_probs),
        "merge routes": lambda p: p.unpack_gathered_shards(x.routes),
    }


def by_loop(x: Inputs) -> dict[str, Callable[[], Any]]:
    """The same work by loops over the sequences."""
    cp = ALIGNMENT.cp
    cu = Packing.from_lengths(x.lengths, ALIGNMENT, rank=0).cu_seqlens_padded.tolist()
    parts = x.lengths + [0] * (len(cu) - 1 - len(x.lengths))  # the tail is a sequence without tokens here
    ids, mask = x.ids.split(parts), x.mask.split(parts)
    return {
        "pack ids, positions": lambda: per_sequence.pack(ids, cu, cp, 0),
        "roll labels, mask": lambda: [per_sequence.roll(each, cu, cp, 0) for each in (ids, mask)],
        "unpack log-probs": lambda: per_sequence.unpack(list(x.log_probs), x.lengths, cu, cp),
        "merge routes": lambda: per_sequence.unpack(list(x.routes), x.lengths, cu, cp),
    }


def operations(work: Callable[[], Any]) -> int:
    """How many tensor operations the work takes."""
    counter = Operations()
    with counter:
        work()
    return counter.count


def milliseconds(loop: Callable[[], Any], plan: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Median CPU time of both, taken in turns."""
    times: tuple[list[int], list[int]] = [], []
    for _ in range(repeats):
        for work, taken in zip((loop, plan), times, strict=True):
            begin = process_time_ns()
            work()
            taken.append(process_time_ns() - begin)
    return median(times[0]) / 1e6, median(times[1]) / 1e6


def same(a: Any, b: Any) -> bool:
    """Whether both ways gave the same tensors."""
    if isinstance(a, Tensor):
        return bool(torch.equal(a, b))
    return all(same(x, y) for x, y in zip(a, b, strict=True))


def measure(x: Inputs, repeats: int) -> None:
    """Prints one line for each kind of work, then one for all of them."""
    loops, plans = by_loop(x), by_plan(x)
    for name in (*loops, "all of these"):
        names = [name] if name in loops else list(loops)

        def loop(names: list[str] = names) -> list[Any]:
            return [loops[name]() for name in names]

        def plan(names: list[str] = names) -> list[Any]:
            packing = Packing.from_lengths(x.lengths, ALIGNMENT, rank=0)
            return [plans[name](packing) for name in names]

        if not same(loop(), plan()):
            raise SystemExit(f"{name}: the two ways differ at {len(x.lengths)} sequences")
        ops = operations(loop), operations(plan)
        ms = milliseconds(loop, plan, repeats)
        print(
            f"{len(x.lengths):>9} {len(x.ids):>8}  {name:<22}"
            f"{ops[0]:>8} ->{ops[1]:>7}{ops[0] / ops[1]:>7.1f}x"
            f"{ms[0]:>9.2f} ->{ms[1]:>8.3f}{ms[0] / ms[1]:>7.1f}x",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shortest", type=int, default=16, help="tokens of the shortest sequence")
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest sequence")
    parser.add_argument("--layers", type=int, default=4, help="layers with routes")
    parser.add_argument("--topk", type=int, default=2, help="experts of each token")
    parser.add_argument("--repeats", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    draw = random.Random(0)
    print(COLUMNS)
    for count in SEQUENCES:
        lengths = [draw.randint(options.shortest, options.longest) for _ in range(count)]
        measure(Inputs.draw(lengths, options.layers, options.topk), options.repeats)


if __name__ == "__main__":
    main()
