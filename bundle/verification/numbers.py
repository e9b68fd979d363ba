"""What a model computes from a batch: its loss, its gradients, and how far they are from a reference."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from bundle.mcore import optimization
from bundle.mcore.groups import Groups
from bundle.models import naming
from bundle.recipe import Recipe
from bundle.verification.bench import Bench
from bundle.verification.tiny import Batch, chunk, recipe, rows, texts

Numbers = dict[str, torch.Tensor]


def run(model: torch.nn.Module, batch: Batch, **options: Any) -> torch.Tensor:
    """The summed loss of a batch on this rank."""
    losses = model(
        batch.ids,
        batch.positions,
        None,
        labels=batch.labels,
        loss_mask=batch.mask,
        packed_seq_params=batch.packed,
        **options,
    )
    total: torch.Tensor = (losses * batch.mask).sum()
    return total


def trained(model: torch.nn.Module, groups: Groups, batches: Sequence[Batch]) -> Numbers:
    """The loss and every gradient of the batches' sum, added up over the context-parallel ranks."""
    total = torch.zeros((), device=batches[0].mask.device)
    for batch in batches:
        loss = run(model, batch)
        loss.backward()
        total += loss.detach()
    return {"loss": summed(total, groups), **gradients(model, groups)}


def gradients(model: torch.nn.Module, groups: Groups) -> Numbers:
    """Every gradient by the parameter's layout-independent name, summed over context-parallel ranks."""
    return {
        named.name: summed(named.parameter.grad.clone(), groups)
        for named in naming.parameters(model, groups)
        if named.parameter.grad is not None
    }


def summed(x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """The sum over the context-parallel ranks."""
    torch.distributed.all_reduce(x, group=groups.cp.group)
    return x


def gradient_norm(
    bench: Bench,
    groups: Groups,
    config: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    *,
    rows_at_once: int = 2,
) -> Numbers:
    """The norm that the optimizer finds after a step of the pipeline schedule, the same on every rank."""
    model = chunk(bench, groups, config, options)
    return {"norm": stepped(bench, groups, recipe(config, groups), model, rows_at_once=rows_at_once)}


def norm_gap(
    bench: Bench, config: Mapping[str, Any], options: Mapping[str, Any] | None = None, **sizes: int
) -> float:
    """The gradient norm in a layout of these parallel sizes, against that of one rank."""
    with bench.layout() as groups:
        reference = gradient_norm(bench, groups, config, options)
    with bench.layout(**sizes) as groups:
        return gap(gradient_norm(bench, groups, config, options), reference)


def stepped(
    bench: Bench, groups: Groups, job: Recipe, model: torch.nn.Module, *, rows_at_once: int = 2
) -> torch.Tensor:
    """The gradient norm of a step of the pipeline schedule and the optimizer, which leaves its weights.

    Of two rows, in one micro-batch or in two.
    """
    wrapped = optimization.data_parallel(job, model.config, [model])
    optimizer = optimization.optimizer(job, wrapped)
    tokens = torch.stack(texts((32, 32)))
    parts = [rows(bench, groups, part, torch.ones(rows_at_once, 32)) for part in tokens.split(rows_at_once)]

    def step(batches: Iterator[Batch], part: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch = next(batches)
        loss, tokens = run(part, batch), batch.mask.sum()
        if model.config.calculate_per_token_loss:
            return loss, lambda _: (loss, tokens.int(), {})
        return loss, lambda _: (loss / (tokens * groups.cp.size), {})  # megatron multiplies by cp

    optimization.forward_backward(step, parts, wrapped, sequence_length=32, micro_batch_size=rows_at_once)
    _, norm, _ = optimizer.step()
    return torch.tensor(norm)


def gap(seen: Numbers, reference: Numbers) -> float:
    """The largest distance of any number, relative to the largest of its tensor; infinite if some lack."""
    if seen.keys() != reference.keys():
        return float("inf")
    distances = [_relative(seen[name], reference[name]) for name in reference]
    return worst(distances)


def worst(gaps: Iterable[float | torch.Tensor]) -> float:
    """The largest; not a number if one is none, which Python's max would lose behind any other."""
    return float(torch.stack([torch.as_tensor(each).double().cpu() for each in gaps]).max())


def _relative(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a - b).abs().max() / b.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
