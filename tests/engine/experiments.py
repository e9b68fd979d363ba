"""How far an engine is from `reference` in one layout: losses, log-probs, entropies and every gradient."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from bundle.engine import Engine, MicroBatch, Scores
from bundle.engine.losses import Objective
from bundle.engine.microbatch import from_packing, from_rows
from bundle.mcore import groups
from bundle.mcore.groups import Groups
from bundle.models import naming
from bundle.packing.packing import Packing
from bundle.recipe import Recipe, from_mapping
from bundle.recipe.alignment import Alignment, Layout
from bundle.verification.numbers import (
    DENSE_HF_CONFIG,
    EXPERTS_CONFIG,
    MLA_CONFIG,
    Bench,
    Numbers,
    measure_gap,
)
from tests.engine.balanced import Balance
from tests.engine.cells import AGREES, GROUPS, Cell
from tests.engine.reference import computed, texts
from tests.reference.losses import ENTROPY
from tests.reference.texts import Text

UNEVEN, EVEN = (12, 23, 6, 17), (24, 24, 24, 24)
STRETCHED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
MODELS = {
    "dense": DENSE_HF_CONFIG,
    "gqa": DENSE_HF_CONFIG | {"num_key_value_heads": 2},
    "mla": MLA_CONFIG,
    "moe": EXPERTS_CONFIG,
    # with a factor in the keys: of all that a head rotates, and of the part that latent attention does
    "dense yarn": DENSE_HF_CONFIG | {"rope_scaling": STRETCHED},
    "mla yarn": MLA_CONFIG | {"rope_scaling": STRETCHED},
    "balanced": MLA_CONFIG | {"first_k_dense_replace": 1, "aux_loss_alpha": 0.4, "seq_aux": True},
}
Z_LOSS = 0.03
BALANCES = {
    "moe": Balance(0.5, Z_LOSS, topk=2, sigmoid=False, together=2),
    "balanced": Balance(0.4, Z_LOSS, topk=2, sigmoid=True, together=1),
}


def recipe(
    config: dict, parallel: dict[str, int], *, packed: bool, recompute: dict | None = None, **mtp: Any
) -> Recipe:
    """The job of a tiny model."""
    return from_mapping(
        {
            "name": "engine",
            "model": {
                "config": config,
                "dtype": "fp32",
                "recompute": recompute,
                "mtp": {"layers": 0, **mtp},
                "moe": {"z_loss_coeff": Z_LOSS if "num_experts_per_tok" in config else 0},
            },
            "parallel": parallel,
            "data": {
                "source": "text",
                "path": ["none"],
                "tokenizer": "hf:none",
                "sequence_length": 128,
                "packed": packed,
            },
            "train": {"steps": 2, "global_batch_size": 8},
            "optimizer": {"lr": 1e-2, "warmup_steps": 0},
        },
    )


@contextlib.contextmanager
def engine(
    bench: Bench, job: Recipe, build_objective: Callable[[Groups], Objective] | None = None
) -> Iterator[Engine]:
    """An engine in the layout of the job, which is forgotten afterwards."""
    made = groups.create_model_parallel_groups(job.parallel, seed=1, timeout_seconds=bench.timeout_seconds)
    try:
        objective = build_objective(made) if build_objective else None
        yield Engine(job, bench.runtime, made, bench.device, objective=objective)
    finally:
        groups.destroy_model_parallel_groups()


def micro_batches(of: Engine, sequences: list[Text], form: str, mean: str) -> list[MicroBatch]:
    """Two sequences each: packed (thd), padded to rows (bshd), or rows as they are; this data rank's part."""
    cp, dp = of.groups.cp, of.groups.dp
    depths = of.recipe.architecture.mtp_layers
    pairs = [sequences[i : i + 2] for i in range(0, len(sequences), 2)]
    return [_micro_batch(of, pair, form, mean, depths, cp) for pair in pairs[dp.rank :: dp.size]]


def _micro_batch(of: Engine, pair: list[Text], form: str, mean: str, depths: int, cp: Any) -> MicroBatch:
    fields = (
        [text.tokens[:-1] for text in pair],
        [text.tokens[1:] for text in pair],
        [text.mask for text in pair],
        [text.advantages for text in pair],
    )
    temperatures = torch.tensor([text.temperature for text in pair])
    options: dict[str, Any] = {"mtp_layers": depths, "mean": mean, "temperatures": temperatures}
    if form == "rows":
        ids, labels, mask, advantages = (torch.stack(each) for each in fields)
        options |= {"cp": cp.size, "rank": cp.rank, "extra_tensors": {"advantages": advantages}}
        return from_rows(ids, labels, mask, **options)
    ids, labels, mask, advantages = (torch.cat(each) for each in fields)
    layout: Layout = "thd" if form == "thd" else "bshd"
    alignment = Alignment(
        layout, tp=of.groups.tp.size, cp=cp.size, sequence_parallel=of.recipe.parallel.sequence_parallel
    )
    # One length for all: pipeline stages exchange activations of one shape. There is a tail.
    length = 64 if form == "thd" else 24
    packing = Packing.from_lengths([len(text.mask) for text in pair], alignment, rank=cp.rank, length=length)
    return from_packing(ids, labels, mask, packing, extra_tensors={"advantages": advantages}, **options)


def compare(bench: Bench, cell: Cell) -> float:
    """The largest relative distance of a forward and backward pass from the reference."""
    sequences, wanted = _reference(
        bench, replace(cell, layout="vpp" if "vpp" in cell.sizes else "", recompute=False)
    )
    recompute = {"granularity": "full"} if cell.recompute else None
    job = recipe(
        _config(cell), cell.sizes, packed=cell.form == "thd", layers=cell.depths, recompute=recompute
    )

    def loss(micro_batch: MicroBatch, scores: Scores) -> torch.Tensor:
        return -micro_batch.extra_tensors["advantages"] * scores.log_probs - ENTROPY * scores.entropy

    with engine(bench, job) as made:
        batches = micro_batches(made, sequences, cell.form, cell.mean)
        seen = scored(made, batches, sequences) if cell.objective else {}
        made.forward_backward(batches, loss if cell.objective else None)
        losses = made.take_losses()
        for k, value in enumerate((losses.main, *losses.mtp)):
            seen[f"loss {k}"] = torch.tensor(value, dtype=torch.float64)
        here = gradients(made)
        expected = {
            name: whole if name not in here else here[name][1](whole) for name, whole in wanted.items()
        }
        seen |= {name: gradient for name, (gradient, _) in here.items()}
        return measure_gap(seen, {name: expected[name] for name in seen})


@functools.cache
def _reference(bench: Bench, cell: Cell) -> tuple[list[Text], Numbers]:
    """Computed once for all layouts that are compared with it in one process."""
    sequences = texts(EVEN if cell.form == "rows" else UNEVEN, cell.learned)
    numbers = computed(
        bench,
        _config(cell),
        sequences,
        depths=cell.depths,
        mean=cell.mean,
        objective=cell.objective,
        balance=BALANCES.get(cell.model),
    )
    return sequences, numbers


def _config(cell: Cell) -> dict[str, Any]:
    """Interleaved stages take more layers."""
    return MODELS[cell.model] | ({"num_hidden_layers": 4} if "vpp" in cell.sizes else {})


def scored(of: Engine, batches: list[MicroBatch], sequences: list[Text]) -> Numbers:
    """What `log_probs` says of each of this data rank's sequences."""
    dp = of.groups.dp
    found: Numbers = {}
    for number, scores in enumerate(of.compute_log_probs(batches)):
        first = 2 * (dp.rank + number * dp.size)
        sizes = [len(text.mask) for text in sequences[first : first + 2]]
        for i, parts in enumerate(
            zip(scores.log_probs.flatten().split(sizes), scores.entropy.flatten().split(sizes), strict=True)
        ):
            found |= {f"log-probs {first + i}": parts[0].double(), f"entropy {first + i}": parts[1].double()}
    return found


def gather_gradients(of: Engine) -> None:
    """Has every rank hold all gradients that its part of the model has."""
    for part in of.chunks:
        for buffer in (*part.buffers, *part.expert_parallel_buffers):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:  # a rank has reduced its own share of each bucket only
                share = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, share, group=group)


def gradients(of: Engine) -> dict[str, tuple[torch.Tensor, Any]]:
    """This rank's gradients by name, after the reduction, and what takes this rank's part of a whole one."""
    gather_gradients(of)
    found: dict[str, tuple[torch.Tensor, Any]] = {}
    for chunk in of.models:
        for named in naming.find_parameters(chunk, of.groups):
            part = named.shard.extract if named.shard else lambda whole: whole
            # Of two with one name (tied, on the last stage) the second, the head's own, is not used.
            found.setdefault(named.name, (named.parameter.main_grad, part))
    return found


def worst(bench: Bench, cells: tuple[Cell, ...]) -> float:
    """The largest distance of these cells; an error that names them if some are too far."""
    gaps = {cell: compare(bench, cell) for cell in cells}
    wrong = [f"{cell}: {distance:.1e}" for cell, distance in gaps.items() if not distance <= AGREES]
    assert not wrong, "; ".join(wrong)
    return max(gaps.values())


def __getattr__(name: str) -> Any:
    """The measurement of a group of cells, by the group's name."""
    if name in GROUPS:
        return functools.partial(worst, cells=GROUPS[name])
    raise AttributeError(name)
