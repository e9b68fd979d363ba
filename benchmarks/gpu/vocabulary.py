"""What the head and its loss cost for a large vocabulary: all tokens at once, in chunks, and Liger's kernel.

python -m benchmarks.gpu.vocabulary [--tokens N] [--words N] [--hidden N] [--chunk N]

Measures time and peak memory, beside inputs and weights, of log-probabilities alone, and of the loss with
both gradients. Ends with 1 where chunks give other numbers than all tokens at once, take more than an eighth
of the memory for log-probabilities, or more time for these. Liger's kernel takes part where it imports.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bundle.engine.scores import Head, score_labels

TOKENS, WORDS, HIDDEN = 32768, 151936, 4096
CHUNK = 3456  # that a plan chooses for so many words
WARM, REPEATS = 2, 7  # the first ones compile
SHARE = 1 / 8  # of the memory of all tokens at once
NEAR = 0.02  # of the largest gradient, in bf16


class Inputs(NamedTuple):
    """Hidden states [n, 1, h], the weight [v, h] with its gradient in fp32, and labels [1, n]."""

    states: Tensor
    weight: Tensor
    labels: Tensor


class Cost(NamedTuple):
    """The median of the seconds, and the bytes at the peak beside the inputs; None if they do not fit."""

    seconds: float
    peak: int


Loss = Callable[[Inputs], Tensor]


def at_once(x: Inputs) -> Tensor:
    """The log-probabilities, from the logits of all tokens."""
    return score_labels(x.states @ x.weight.t(), x.labels, None).log_probs


def in_chunks(x: Inputs, chunk: int, kept_tokens: int = 0) -> Tensor:
    """The log-probabilities, from the logits of a chunk at a time; those of the first tokens are kept."""
    head = Head(x.weight, chunk, len(x.weight), kept_tokens=kept_tokens)
    return score_labels(x.states, x.labels, None, None, head).log_probs


def by_megatron(x: Inputs) -> Tensor:
    """The same by the loss that a model in bf16 trains with where it takes all tokens at once."""
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    logits = x.states @ x.weight.t()
    losses = fused_vocab_parallel_cross_entropy(logits, x.labels.t().contiguous(), dist.group.WORLD)
    return -losses.t()


def find_liger() -> dict[str, Loss]:
    """Liger's kernel, which gives a sum alone; nothing where it does not import."""
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError as error:
        print(f"without Liger's kernel: {error}")
        return {}
    kernel = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return {"Liger": lambda x: -kernel(x.weight, x.states.flatten(0, 1), x.labels.flatten())}


def train(loss: Loss, x: Inputs) -> Tensor:
    """Both gradients of the summed loss; the weight's is added to the one in fp32, as megatron does."""
    x.states.grad, main = None, vars(x.weight)["main_grad"]
    total = -loss(x).sum()
    total.backward()
    main.add_(x.weight.grad)
    x.weight.grad = None
    return total.detach()


def evaluate(loss: Loss, x: Inputs) -> Tensor:
    """The log-probabilities without gradients."""
    with torch.no_grad():
        return loss(x)


def measure(run: Callable[[], Any], device: torch.device) -> Cost | None:
    """The cost of one run; None if the device has not the memory."""
    seconds, peak = [], 0
    for _ in range(WARM + REPEATS):
        wait(device)
        before = reset_peak(device)
        began = time.perf_counter()
        try:
            run()
        except torch.OutOfMemoryError:
            return None
        wait(device)
        seconds.append(time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
    return Cost(median(seconds[WARM:]), peak)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def reset_peak(device: torch.device) -> int:
    """The bytes that are allocated now, from where the peak is counted."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    allocated: int = torch.cuda.memory_allocated()
    return allocated


def distance(loss: Loss, other: Loss, x: Inputs) -> float:
    """The largest difference of losses and gradients, relative to the largest number of each."""
    found = []
    for one in (loss, other):
        vars(x.weight)["main_grad"].zero_()
        total = train(one, x)
        found.append([total, x.states.grad, vars(x.weight)["main_grad"].clone()])
    return max(
        float((a.float() - b.float()).abs().max() / b.float().abs().max())
        for a, b in zip(*found, strict=True)
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--words", type=int, default=WORDS)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--chunk", type=int, default=CHUNK, help="tokens of a chunk")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    draw = partial(torch.randn, device=device, dtype=torch.bfloat16)
    x = Inputs(
        draw(options.tokens, 1, options.hidden).requires_grad_(),
        draw(options.words, options.hidden).mul_(0.05).requires_grad_(),
        torch.randint(options.words, (1, options.tokens), device=device),
    )
    vars(x.weight)["main_grad"] = torch.zeros(x.weight.shape, device=device)
    chunk: int = options.chunk
    chunks, kept = (partial(in_chunks, chunk=chunk, kept_tokens=tokens) for tokens in (0, 4 * chunk))
    losses: dict[str, Loss] = {"at once": at_once, f"chunks of {chunk}": chunks, "megatron": by_megatron}
    costs = {name: measure(partial(evaluate, loss, x), device) for name, loss in losses.items()}
    show("log-probabilities", costs)
    ways = losses | {f"{4 * chunk} kept": kept} | find_liger()
    trained = {name: measure(partial(train, loss, x), device) for name, loss in ways.items()}
    show("loss and gradients", trained)
    few = x._replace(
        states=x.states.detach()[: 2 * chunk + 1].requires_grad_(), labels=x.labels[:, : 2 * chunk + 1]
    )
    some_kept = partial(in_chunks, chunk=chunk, kept_tokens=chunk)
    far = max(distance(way, at_once, few) for way in (chunks, some_kept))
    whole, part, *_ = costs.values()
    claims = {f"gradients within {far:.1e} of those at once": far <= NEAR}
    if device.type == "cuda" and whole is not None and part is not None:
        claims[f"{part.peak / whole.peak:.3f} of the memory"] = part.peak <= SHARE * whole.peak
        claims[f"{part.seconds / whole.seconds:.3f} of the time"] = part.seconds <= whole.seconds
    for claim, holds in claims.items():
        print(f"{'ok' if holds else 'FAILED':<7}{claim}")
    dist.destroy_process_group()
    return 0 if all(claims.values()) else 1


def show(title: str, costs: Mapping[str, Cost | None]) -> None:
    """Print a line for each."""
    for name, cost in costs.items():
        seen = f"{cost.seconds * 1e3:9.1f} ms {cost.peak / 2**30:7.2f} GiB" if cost else "no memory left"
        print(f"{title:<20}{name:<20}{seen}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
