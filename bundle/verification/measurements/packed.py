"""What packed input makes the host wait for, and what recomputation keeps."""

import weakref
from itertools import accumulate
from typing import Any

import torch

from bundle.mcore import rotary
from bundle.mcore.context import in_backward
from bundle.verification.numbers import (
    DENSE,
    EXPERTS,
    Bench,
    NotProvable,
    chunk,
    gap,
    packed,
    rows,
    run,
    single,
    texts,
    trained,
    worst,
)

LENGTHS, HEADS, WIDTH = (8, 4, 20, 12), 3, 16  # multiples of 4: both chunks of two ranks are even


def rotary_positions(bench: Bench) -> float:
    """Rows of two context-parallel ranks, by a table of the longest sequence, against plain trigonometry."""
    with bench.layout(cp=2) as groups:
        group = groups.cp.group
        rank, ranks = group.rank(), group.size()
        whole = [torch.randn(length, HEADS, WIDTH, device=bench.device) for length in LENGTHS]
        for sequence in whole:
            torch.distributed.broadcast(sequence, torch.distributed.get_process_group_ranks(group)[0], group)
        mine = torch.cat([_cut(sequence, rank, ranks) for sequence in whole])
        reference = torch.cat([_cut(_rotated(sequence), rank, ranks) for sequence in whole])
        boundaries = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32, device=bench.device)
        seen = rotary.turned(mine, boundaries, _table(max(LENGTHS), bench.device), group)
        # Tensors of the meta device have no values: any look at one raises.
        rotary.turned(mine.to("meta"), boundaries.to("meta"), _table(max(LENGTHS), "meta"), group)
    return float((seen - reference).abs().max() / reference.abs().max())


def attention(bench: Bench) -> float:
    """A padded pack through a dense model in bf16, where torch refuses every operation that waits."""
    if bench.device.type != "cuda":
        raise NotProvable("only a GPU makes the host wait")
    sequences = texts((12, 24, 6))
    with bench.layout() as groups:
        model = chunk(bench, groups, DENSE, dtype="bf16")
        reference = trained(model, groups, single(bench, groups, sequences))
        batch = packed(bench, groups, sequences, multiple=8)
        trained(model, groups, [batch])  # kernels are chosen and loaded
        model.zero_grad()
        torch.cuda.set_sync_debug_mode("error")
        try:
            seen = trained(model, groups, [batch])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return gap({"loss": seen["loss"]}, {"loss": reference["loss"]})


def _cut(sequence: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    chunks = sequence.chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


def _angles(positions: int, device: Any) -> torch.Tensor:
    frequencies = 10.0 ** -torch.arange(0, WIDTH // 2, device=device)
    return torch.outer(torch.arange(positions, device=device), frequencies)


def _table(positions: int, device: Any) -> torch.Tensor:
    angles = _angles(positions, device)
    return torch.cat((angles, angles), -1)[:, None, None, :]


def _rotated(sequence: torch.Tensor) -> torch.Tensor:
    """Halves of a head's width turned by the angle of their position: [s, n, d]."""
    angles = _angles(sequence.shape[0], sequence.device)[:, None, :].double()
    first, second = sequence.double().chunk(2, -1)
    turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
    return torch.cat(turned, -1).float()


_FULL = {"granularity": "full"}


def prediction_layers(bench: Bench) -> float:
    """Layers of multi-token prediction on packed and on unpacked input."""
    sequences = texts((12, 24, 6))
    gaps = []
    with bench.layout() as groups:
        for batches in (
            [packed(bench, groups, sequences, multiple=1)],
            single(bench, groups, sequences),
        ):
            kept, recomputed = (
                trained(chunk(bench, groups, DENSE, mtp={"layers": 1}, recompute=how), groups, batches)
                for how in (None, _FULL)
            )
            gaps.append(gap(recomputed, kept))
    return worst(gaps)


def inputs_alive(bench: Bench) -> float:
    """How many layers' recomputed inputs are still in memory after the backward pass."""
    inputs: list[weakref.ref[torch.Tensor]] = []

    def remember(_module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if in_backward():
            inputs.extend(weakref.ref(x) for x in (*args, kwargs.get("hidden_states")) if torch.is_tensor(x))

    with bench.layout() as groups:
        model = chunk(bench, groups, EXPERTS, recompute=_FULL)
        for layer in model.decoder.layers:
            layer.register_forward_pre_hook(remember, with_kwargs=True)
        batch = rows(bench, groups, torch.stack(texts((16, 16))), torch.ones(2, 16))
        run(model, batch).backward()
        if not inputs:
            return float("inf")
        return float(sum(reference() is not None for reference in inputs))
