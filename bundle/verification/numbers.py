"""What a model computes from a batch: its loss, its gradients, and how far they are from a reference."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from bundle.mcore import optimization, schedules
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


def gradient_norm(bench: Bench, groups: Groups, config: Mapping[str, Any]) -> Numbers:
    """The norm that the optimizer finds after a step of the pipeline schedule, the same on every rank."""
    return {"norm": stepped(bench, groups, recipe(config, groups), chunk(bench, groups, config))}


def norm_gap(bench: Bench, config: Mapping[str, Any], **sizes: int) -> float:
    """The gradient norm in a layout of these parallel sizes, against that of one rank."""
    with bench.layout() as groups:
        reference = gradient_norm(bench, groups, config)
    with bench.layout(**sizes) as groups:
        return gap(gradient_norm(bench, groups, config), reference)


def stepped(bench: Bench, groups: Groups, job: Recipe, model: torch.nn.Module) -> torch.Tensor:
    """The gradient norm of a step of the pipeline schedule and the optimizer, which leaves its weights."""
    wrapped = optimization.data_parallel(job, model.config, [model])
    optimizer = optimization.optimizer(job, wrapped)
    batch = rows(bench, groups, torch.stack(texts((32, 32))), torch.ones(2, 32))

    def step(batches: Iterator[Batch], part: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        loss = run(part, next(batches))
        return loss, lambda _: (loss, batch.mask.sum().int(), {})

    schedules.run(step, [batch], wrapped, sequence_length=32, micro_batch_size=2)
    _, norm, _ = optimizer.step()
    return torch.tensor(norm)


def gap(seen: Numbers, reference: Numbers) -> float:
    """The largest distance of any number, relative to the largest of its tensor; infinite if some lack."""
    if seen.keys() != reference.keys():
        return float("inf")
    distances = [_relative(seen[name], reference[name]) for name in reference]
    return float(torch.stack(distances).max())  # nan stays nan


def _relative(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a - b).abs().max() / b.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
