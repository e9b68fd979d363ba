"""Recomputed activations, against the same pass with everything kept."""

import weakref
from typing import Any

import torch

from bundle.mcore.context import in_backward
from bundle.verification.bench import Bench
from bundle.verification.numbers import gap, run, trained, worst
from bundle.verification.tiny import DENSE, EXPERTS, chunk, packed, rows, single, texts

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
